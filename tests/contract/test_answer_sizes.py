"""No list in an answer is larger than its bound, whatever the records hold, and its pages together are the whole list.

The bound is small here, so that few records pass it: what is proven is that it holds, for each list route of the OpenAPI document.
"""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
from dataclasses import replace
from urllib.parse import quote

import pytest

from phalanx.api.services import ApiLimits
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.extras import Licence
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.users import User, UserRole
from phalanx.ports.store import Batch
from phalanx.store.memory import MemoryStore
from tests.contract.api_head import PEOPLE, TOKENS, ApiHead, token_of
from tests.contract.records import job, node, one_of_each_kind

BOUND = 5_000
ONE = 2_000  # of the longest record here: each list has at least one
COUNT = 48
LONG = "long-" + "x" * 50
# Routes whose answer is no list of records, or one record: their size has other bounds, which the text after them names.
OTHERS = {
    "/metrics": "Prometheus's text",
    "/v1/audit/verify": "one report",
    "/v1/ca": "one certificate",
    "/v1/channels": "at most 200, with bounded URLs",
    "/v1/energy": "at most 1,000 rows of a fixed size",
    "/v1/cost": "at most 1,000 rows of a fixed size",
    "/v1/failures": "at most 1,000 rows of a fixed size",
    "/v1/token-usage": "at most 1,000 rows of a fixed size",
    "/v1/invoice": "at most 4,000 lines of a fixed size",
    "/v1/prices": "at most 1,000 prices of a fixed size",
    "/v1/fleet": "the state of every GPU by columns, about 40 bytes a node",
    "/v1/health": "one record",
    "/v1/history": "one record",
    "/v1/history/devices": "columns whose step is chosen so that they are below 1 MB",
    "/v1/history/nodes": "the same",
    "/v1/heads": "the heads of one store",
    "/v1/join": "one record",
    "/v1/join/files": "one file of the release",
    "/v1/join/order": "one record",
    "/v1/me": "one record",
    "/v1/openapi.json": "one document",
    "/v1/nodes/{node_id}/tests": "20 tests of at most 38 rates",
    "/v1/profile": "one document of at most `profile_bytes`",
    "/v1/retention": "one record",
    "/v1/archives": "one row a month",
    "/v1/pools/{pool_id}/consoles/{node_id}": "one text of at most 32,768 characters",
    "/v1/archives/{month}": "1,000 rows at most, of names with a limit",
    "/v1/sign-in": "one record with at most 1,000 groups",
    "/v1/rules": "one document of at most `body_bytes`",
    "/v1/waste": "at most 1,000 rows of a fixed size",
    "/v1/usage": "at most 1,000 rows of a fixed size",
}
# How each list continues: the field of the answer with the records, and the parameters of the next page.
LISTS = {
    "/v1/audit": ("lines", lambda page: f"after={page['lines'][-1]['seq']}" if page["lines"] else ""),
    "/v1/jobs": ("jobs", lambda page: f"after={quote(page['after'])}" if page["after"] else ""),
    "/v1/licences": ("licences", None),
    "/v1/nodes": ("nodes", None),
    "/v1/overview": ("pending", lambda page: ""),
    "/v1/pools": ("pools", None),
    "/v1/projects": ("projects", None),
    "/v1/queues": ("queues", None),
    "/v1/reservations": ("reservations", None),
    "/v1/secrets": ("secrets", None),
    "/v1/services?stopped=1": ("services", None),
    "/v1/tokens": ("tokens", None),
    "/v1/users": ("users", None),
}


def filled_store():
    """A store with many long records of every kind that a list shows."""
    store = MemoryStore()
    specimens = {type(record).__name__: record for record in one_of_each_kind()}
    reservation, pool = specimens["Reservation"], specimens["NodePool"]
    service, revision = specimens["Service"], specimens["Revision"]
    secret = specimens["Secret"]
    names = [f"{LONG}-{number:03}" for number in range(COUNT)]
    records = [
        *(User(id=name, role=kind) for name, kind in PEOPLE.values()),
        *(token_of(name, TOKENS[role]) for role, (name, _) in PEOPLE.items()),
        *(User(id=name, role=UserRole.USER) for name in names),
        *(replace(token_of("ada", name), id=name) for name in names),
        Project(id="default"),
        *(Project(id=name, members=frozenset(names[:20])) for name in names),
        Queue(id="default"),
        *(Queue(id=name) for name in names),
        *(
            replace(reservation, id=f"{name}-{part}", start_s=4e9, end_s=5e9, begun=False, ended=False)
            for name in names
            for part in range(4)
        ),
        *(replace(pool, id=f"{name}-{part}") for name in names for part in range(4)),
        *(replace(service, id=name, revision=1, stopped_by="ada") for name in names),
        *(replace(revision, service=name, number=1) for name in names),
        *(
            replace(secret, id=f"{name}-{part}", owner="default", name=f"S{part}_{name}")
            for name in names
            for part in range(4)
        ),
        *(Licence(id=f"{name}-{part}", total=3) for name in names for part in range(4)),
        *(node(name) for name in names),
        *(job(seq, name=names[seq % COUNT], queue="default", project="default") for seq in range(1, COUNT + 1)),
    ]
    history = [HistoryLine(seq=seq, at_s=1.0, kind="note", text="t" * 900, job_id="1") for seq in range(1, COUNT + 1)]
    store.commit(Batch(records=records, history=history))
    return store


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    head = ApiHead(str(tmp_path_factory.mktemp("head")), limits=ApiLimits(answer_bytes=BOUND), store=filled_store())
    with head.calling() as call:
        yield call
    head.close()


def test_every_list_is_bounded_and_its_pages_hold_everything_once(call):
    history = ("story", lambda page: f"after={page['last']}" if page["story"] else "")
    lists = {**LISTS, "/v1/story": history, "/v1/jobs/1/story": history}
    for path, (field, more) in lists.items():
        found, query, pages = [], "limit=1000" if path == "/v1/jobs" or path.endswith("story") else "", 0
        if path == "/v1/audit":
            query = "after=0&limit=1000"
        first = query
        while True:
            answer = call("admin", "GET", path + ("&" if "?" in path else "?") + query)
            assert answer.status_code == 200, (path, answer.text[:300])
            assert len(answer.content) <= BOUND + ONE, (path, len(answer.content))
            page = json.loads(answer.content)
            found += [json.dumps(one.get("id") or one.get("name") or one.get("seq")) for one in page[field]]
            pages += 1
            after = (f"after={quote(page['next'])}" if page["next"] else "") if more is None else more(page)
            if not after:
                break
            query = f"{first}&{after}" if path != "/v1/audit" else f"{after}&limit=1000"
        assert len(found) == len(set(found)), path
        if path not in ("/v1/overview", "/v1/audit"):
            assert pages > 1, path
            assert len(found) >= COUNT, path


def test_lists_without_pages_say_that_they_are_cut(call):
    assert call("admin", "GET", "/v1/overview").json()["truncated"]
    for _ in range(30):  # lines enough
        assert call("operator", "POST", f"/v1/nodes/{LONG}-000/drain", {"why": "fan"}).status_code == 200
    assert call("admin", "GET", "/v1/audit?limit=1").json()["truncated"] is False
    cut = call("admin", "GET", "/v1/audit?limit=1000").json()
    assert cut["truncated"]
    assert cut["lines"][-1]["seq"] == call("admin", "GET", "/v1/audit?limit=1").json()["lines"][0]["seq"]


def test_every_get_route_of_the_document_is_a_bounded_list_or_named_as_none(call):
    document = call("admin", "GET", "/v1/openapi.json").json()
    routes = {path for path, verbs in document["paths"].items() if "get" in verbs and "{" not in path}
    routes -= {path for path in routes if path.startswith("/v1/node/") or path.endswith("/events")}
    lists = {path.partition("?")[0] for path in LISTS} | {"/v1/story"}
    pages = {path for path in routes if not path.startswith(("/v1/", "/metrics"))}
    assert routes - lists - set(OTHERS) - pages == set()


def test_a_key_that_is_no_longer_in_a_list_is_refused(call):
    for path in ("/v1/users", "/v1/tokens", "/v1/queues"):
        assert call("admin", "GET", f"{path}?after=nobody").status_code == 400
