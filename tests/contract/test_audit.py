"""The audit trail: durable with what it tells of, and one that shows what was done to it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import os
import sqlite3
import zlib
from dataclasses import replace

import msgspec
import pytest

from phalanx.api.app import build_app
from phalanx.app.audit_checkpoints import FileAuditCheckpoints
from phalanx.client import Client
from phalanx.core.access.audit import (
    AuditCall,
    ChainTip,
    ChainVerifier,
    audit_key,
    mac_of,
    next_line,
    parse_anchor,
)
from phalanx.core.errors import BadRequest, NotPermitted
from phalanx.core.state.events import PutUser
from phalanx.core.work.users import User, UserRole
from phalanx.ports.store import Batch, StoreRefused
from phalanx.store.sql.sqlite.store import SqliteStore
from tests.contract.api_head import SECRET, TOKENS, ApiHead, Supervisor, until
from tests.contract.exec_socket import open_exec
from tests.contract.test_store_contract import opened

KEY = audit_key(SECRET)


class AuditedHead(ApiHead):
    """With the chain's key, and anchors in a file."""

    def __post_init__(self):
        super().__post_init__()
        self.anchors = FileAuditCheckpoints(f"{self.home}/audit.anchors")
        self.driver.audit.key = KEY  # before anything is told
        self.parts = replace(self.parts, audit_key=KEY, audit_checkpoints=self.anchors)
        self.app = build_app(self.parts)


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(str(tmp_path / "phalanx.db"))
    yield store
    store.close()


@pytest.fixture
def head(tmp_path, store):
    head = AuditedHead(str(tmp_path / "home"), store=store)
    yield head
    head.close()


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


@pytest.fixture
def trail(call):
    """A few lines, and a way to ask about them."""
    for number in range(5):
        assert call("operator", "PUT", f"/v1/queues/q{number}", {"priority": number}).status_code == 200
    return lambda *anchors: call(
        "admin", "GET", "/v1/audit/verify" + "".join(f"?anchor={one}" for one in anchors)
    ).json()


def lines(call, query=""):
    return call("admin", "GET", f"/v1/audit{query}").json()["lines"]


def tampered(tmp_path, sql, *values):
    """Somebody who can write the database, and knows its checksums, but not the head's key."""
    base = sqlite3.connect(tmp_path / "phalanx.db", isolation_level=None)
    base.create_function("crc", 1, lambda doc: zlib.crc32(doc.encode()))
    base.execute(sql, values)
    base.close()


REWRITE = "UPDATE audit SET doc = replace(doc, ?, ?), crc = crc(replace(doc, ?, ?)) WHERE seq = ?"


# ---- what is told -----------------------------------------------------------------------------------------------------


def test_a_line_says_who_what_on_what_from_where_and_how_it_ended(call):
    call("admin", "PUT", "/v1/users/eve", {"role": "operator"})
    line = lines(call)[-1]
    assert (line["user"], line["token_id"], line["origin"]) == ("root", "t-root-14", "127.0.0.1")
    assert (line["action"], line["target"]) == ("PUT /v1/users/{user_id}", "user_id=eve")
    assert (line["detail"], line["result"]) == ("user eve role operator", "done")


def test_a_refusal_is_told_with_its_code(call):
    call("user", "PUT", "/v1/users/eve", {"role": "admin"})
    call("admin", "PUT", "/v1/queues", {"queues": [{"id": "a", "parent": "b"}, {"id": "b", "parent": "a"}]})
    until(lambda: len(lines(call)) == 2)
    told = {(line["user"], line["action"]): line["result"] for line in lines(call)}
    assert told["ada", "PUT /v1/users/{user_id}"] == "not_permitted"
    assert told["root", "PUT /v1/queues"] not in ("", "done")


def test_a_flood_of_refusals_does_not_fill_the_trail(call):
    for _ in range(100):
        assert call("user", "PUT", "/v1/users/eve", {}).status_code == 403
    call("admin", "PUT", "/v1/queues/last", {})
    assert 1 < len(lines(call, "?limit=1000")) <= 62


def test_the_trail_tells_no_command_no_environment_and_no_token(head, call):
    job = {
        "run": ["train", "--password", "canary-argv"],
        "env": {"KEY": "canary-env"},
        "workdir": "/tmp",
        "gpus": 1,
        "name": "x",
    }
    assert call("user", "POST", "/v1/jobs", job).status_code == 201
    made = call("user", "POST", "/v1/tokens", {"note": "canary-note"}).json()
    text = call("admin", "GET", "/v1/audit").text
    assert "canary" not in text
    assert made["secret"] not in text
    assert f"token {made['token']['id']} of ada" in text


def test_a_command_beside_a_job_is_told_before_it_runs(head, call):
    Supervisor(call).hello()
    job_id = call.submit()
    until(lambda: head.store.attempts(job_id))
    Supervisor(call).run(job_id)
    until(lambda: head.store.attempts(job_id)[-1].state == "running")
    _session = open_exec(call, job_id, "operator", argv=["cat", "canary-file"])
    assert lines(call)[-1]["detail"] == f"job {job_id} of ada node n0 runs 'cat'"


def test_what_was_answered_is_in_the_database_with_its_line(tmp_path, head, call):
    call("admin", "PUT", "/v1/users/eve", {"role": "admin"})
    with sqlite3.connect(f"file:{tmp_path}/phalanx.db?mode=ro", uri=True) as base:
        rows = base.execute("SELECT doc FROM audit").fetchall()
        users = base.execute("SELECT role FROM users WHERE id = 'eve'").fetchall()
    assert users == [("admin",)]
    assert any("user eve role admin" in doc for (doc,) in rows)


def test_an_effect_and_its_line_are_committed_together_or_not_at_all(head, monkeypatch):
    """A store that refuses the line refuses what it tells of."""
    whole = head.store.commit

    def commit(batch):
        if batch.audit:
            raise StoreRefused("the disk is full")
        whole(batch)

    monkeypatch.setattr(head.store, "commit", commit)
    told = AuditCall(user="root", token_id="t", origin="here", action="PUT")
    with pytest.raises(StoreRefused):
        head.driver.request(PutUser(user=User(id="eve", role=UserRole.ADMIN)), told).result(100)
    monkeypatch.undo()
    assert head.store.user("eve") is None
    assert head.driver.audit_tip == ChainTip()
    assert head.ask(PutUser(user=User(id="eve", role=UserRole.USER)))


def test_the_list_is_for_admins_and_is_filtered_and_paged(head, call):
    for number in range(5):
        call("operator", "PUT", f"/v1/queues/q{number}", {})
    call("admin", "PUT", "/v1/queues/last", {})
    assert call("operator", "GET", "/v1/audit").status_code == 403
    assert [line["seq"] for line in lines(call)] == [1, 2, 3, 4, 5, 6]
    assert [line["seq"] for line in lines(call, "?limit=2")] == [5, 6]
    assert [line["seq"] for line in lines(call, "?after=1&limit=2")] == [2, 3]
    assert [line["seq"] for line in lines(call, "?user=root")] == [6]
    assert lines(call, f"?since_s={head.clock.now_s() + 60}") == []


# ---- what is seen of tampering ------------------------------------------------------------------------------------------


def test_a_trail_that_nobody_touched_is_sound(trail):
    report = trail()
    assert (report["lines"], report["flaws"]) == (5, [])
    assert trail(report["anchor"])["flaws"] == []


def test_a_changed_line_is_seen(trail, tmp_path):
    tampered(tmp_path, REWRITE, "opal", "root", "opal", "root", 3)
    assert [flaw["seq"] for flaw in trail()["flaws"]] == [3]


def test_a_removed_line_is_seen(trail, tmp_path):
    tampered(tmp_path, "DELETE FROM audit WHERE seq = 2")
    (flaw,) = trail()["flaws"]
    assert (flaw["seq"], flaw["text"]) == (2, "missing: line 2 was removed")


def test_two_lines_that_changed_places_are_seen(trail, tmp_path):
    base = sqlite3.connect(tmp_path / "phalanx.db", isolation_level=None)
    docs = dict(base.execute("SELECT seq, doc FROM audit").fetchall())
    for here, there in ((2, 3), (3, 2)):
        doc = docs[there].replace(f'"seq":{there}', f'"seq":{here}')
        base.execute("UPDATE audit SET doc = ?, crc = ? WHERE seq = ?", (doc, zlib.crc32(doc.encode()), here))
    base.close()
    assert {2, 3} <= {flaw["seq"] for flaw in trail()["flaws"]}


def test_a_line_put_in_is_seen(trail, tmp_path):
    forged = next_line(
        AuditCall(user="opal", token_id="t", origin="here", action="DELETE"),
        ChainTip(seq=5, mac="0" * 64),
        1.0,
        b"not the key",
    )
    doc = msgspec.json.encode(forged).decode()
    tampered(tmp_path, "INSERT INTO audit VALUES (6, 1.0, 'opal', ?, crc(?))", doc, doc)
    assert 6 in {flaw["seq"] for flaw in trail()["flaws"]}


def test_lines_cut_off_while_the_head_runs_are_missed(trail, tmp_path):
    tampered(tmp_path, "DELETE FROM audit WHERE seq >= 4")
    (flaw,) = trail()["flaws"]
    assert flaw["text"] == "truncated: the trail had at least 5 lines and ends at 3"


def test_lines_cut_off_while_the_head_was_down_are_missed_by_its_anchors(trail, tmp_path, head, call):
    head.anchors.record(head.driver.audit_tip)
    tampered(tmp_path, "DELETE FROM audit WHERE seq >= 4")
    newest = head.store.audit_tip()
    head.driver.audit.tip = ChainTip(seq=newest.seq, mac=newest.mac)  # as the next head finds it
    assert trail()["flaws"][0]["text"].startswith("truncated")
    os.unlink(tmp_path / "home" / "audit.anchors")
    assert trail()["flaws"] == []  # what the chain alone cannot show
    call("operator", "PUT", "/v1/queues/more", {})
    call("operator", "PUT", "/v1/queues/more2", {})
    assert trail()["flaws"] == []


def test_an_anchor_kept_elsewhere_shows_a_trail_that_was_written_anew(trail, tmp_path, head, call):
    kept = trail()["anchor"]
    tampered(tmp_path, "DELETE FROM audit WHERE seq >= 4")
    newest = head.store.audit_tip()
    head.driver.audit.tip = ChainTip(seq=newest.seq, mac=newest.mac)
    for number in range(3):
        call("operator", "PUT", f"/v1/queues/other{number}", {})
    assert trail()["flaws"] == []
    (flaw,) = trail(kept)["flaws"]
    assert (flaw["seq"], "rewritten" in flaw["text"]) == (5, True)


def test_a_trail_of_another_head_is_one_flaw():
    theirs = signed_lines(60, b"their key")
    ours = signed_lines(5, b"our key", follows=theirs[-1])
    (flaw,) = flaws_of([*theirs, *ours], b"our key", [])
    assert flaw.text.startswith("lines 1 to 60 were signed with another key: they come from a backup of another head")


def test_a_trail_that_goes_on_from_an_older_backup_is_one_flaw():
    before = signed_lines(80, b"key")
    anchors = [ChainTip(seq=line.seq, mac=line.mac) for line in before[::5]]
    after = signed_lines(30, b"key", follows=before[39], user="bob")
    (flaw,) = flaws_of([*before[:40], *after], b"key", anchors)
    assert (flaw.seq, "restored from an older backup" in flaw.text) == (41, True)


def signed_lines(count, key, *, follows=None, user="ann"):
    """The first lines of a trail, or those after the line `follows`."""
    tip = ChainTip()
    if follows is not None:
        tip = ChainTip(seq=follows.seq, mac=follows.mac)
    found = []
    for _ in range(count):
        line = next_line(AuditCall(user=user, token_id="t", origin="here", action="PUT"), tip, 1.0, key)
        tip = ChainTip(seq=line.seq, mac=line.mac)
        found.append(line)
    return found


def flaws_of(lines, key, anchors):
    examined = ChainVerifier.for_anchors(key, anchors)
    for line in lines:
        examined.verify(line)
    examined.finish()
    return examined.flaws


def test_a_damaged_line_is_a_flaw_and_no_fault_of_ours(trail, tmp_path):
    base = sqlite3.connect(tmp_path / "phalanx.db", isolation_level=None)
    base.execute("UPDATE audit SET doc = replace(doc, 'opal', 'root') WHERE seq = 3")  # the checksum as it was
    base.close()
    report = trail()
    assert 3 in {flaw["seq"] for flaw in report["flaws"]}
    assert report["lines"] == 4


@pytest.mark.parametrize("text", ["", "5", "5:", "5:zz", "-1:" + "0" * 64, "9" * 16 + ":" + "0" * 64, "5:" + "A" * 64])
def test_what_is_no_anchor_is_refused(call, text):
    with pytest.raises(BadRequest):
        parse_anchor(text)
    assert call("admin", "GET", f"/v1/audit/verify?anchor={text}").status_code == 400


def test_every_word_of_a_line_counts():
    line = next_line(
        AuditCall(user="ada", token_id="t", origin="o", action="a", target="x", detail="d"), ChainTip(), 5.0, KEY
    )
    others = [
        replace(line, **{name: value})
        for name, value in {
            "seq": 2,
            "at_s": 5.5,
            "user": "bob",
            "token_id": "u",
            "origin": "p",
            "action": "b",
            "target": "y",
            "detail": "e",
            "result": "no",
        }.items()
    ]
    macs = {mac_of(one, "", KEY) for one in [line, *others]} | {mac_of(line, "0", KEY), mac_of(line, "", b"another")}
    assert len(macs) == len(others) + 3


def test_what_moves_from_one_word_to_the_next_is_another_line():
    first = next_line(AuditCall(user="ada", token_id="t", origin="o", action="ab", target="c"), ChainTip(), 5.0, KEY)
    second = replace(first, action="a", target="bc")
    assert mac_of(first, "", KEY) != mac_of(second, "", KEY)


def test_one_flaw_does_not_make_all_that_follows_doubtful():
    tip, written = ChainTip(), []
    for number in range(6):
        written.append(next_line(AuditCall(user="ada", token_id="t", origin="o", action=f"{number}"), tip, 5.0, KEY))
        tip = ChainTip(seq=written[-1].seq, mac=written[-1].mac)
    examined = ChainVerifier.for_anchors(KEY, [tip])
    for line in [*written[:2], replace(written[2], user="bob"), *written[3:]]:
        examined.verify(line)
    examined.finish()
    assert [flaw.seq for flaw in examined.flaws] == [3]


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
def test_every_store_keeps_the_trail(kind, tmp_path):
    with opened(kind, str(tmp_path)) as store:
        keeps_the_trail(store)


def keeps_the_trail(store):
    tip, written = ChainTip(), []
    for number in range(5):
        user = "ada" if number % 2 else "bob"
        written.append(
            next_line(AuditCall(user=user, token_id="t", origin="ü", action=f"{number}"), tip, 5.0 + number, KEY)
        )
        tip = ChainTip(seq=written[-1].seq, mac=written[-1].mac)
    assert store.audit_tip() is None
    store.commit(Batch(audit=written[:2]))
    store.commit(Batch(audit=written[2:]))
    assert store.audit(after=0) == written
    assert store.audit(limit=2) == written[3:]
    assert store.audit(after=0, user="ada") == written[1::2]
    assert store.audit(user="bob", limit=1) == [written[4]]
    assert store.audit(since_s=8.0) == written[3:]
    assert store.audit_tip() == written[-1]
    with pytest.raises(StoreRefused):
        store.commit(Batch(audit=written[:1]))
    assert store.audit(after=0) == written


def test_anchors_are_read_over_a_torn_line(tmp_path):
    anchors = FileAuditCheckpoints(str(tmp_path / "a"))
    assert anchors.read_all() == []
    anchors.record(ChainTip(seq=3, mac="a" * 64))
    with open(tmp_path / "a", "a", encoding="ascii") as file:
        file.write("7:abc\n")
    anchors.record(ChainTip(seq=9, mac="b" * 64))
    assert [tip.seq for tip in anchors.read_all()] == [3, 9]


def test_the_client_reads_and_verifies(head):
    with head.served() as url:
        Client(url, TOKENS["operator"]).put_queue("fast")
        admin = Client(url, TOKENS["admin"])
        found = admin.audit(user="opal")
        assert [line.action for line in found.lines] == ["PUT /v1/queues/{queue_id}"]
        assert admin.verify_audit([found.anchor]).flaws == []
        with pytest.raises(NotPermitted):
            Client(url, TOKENS["operator"]).audit()


def test_a_gateway_that_reports_use_every_few_seconds_leaves_one_line_an_hour(head, call):
    """Found by counting: 14,400 lines a day for each gateway, all with the same words."""

    def report(caller, gateway, sequence):
        reply = call(caller, "POST", f"/v1/gateways/{gateway}/usage", {"sequence": sequence, "hours": []})
        assert (reply.status_code, reply.json()["sequence"]) == (200, sequence)

    def reported():
        return [(one["user"], one["target"]) for one in lines(call) if one["action"].endswith("/usage")]

    assert call("operator", "POST", "/v1/gateways/a/usage", {"sequence": "x"}).status_code == 400
    for sequence in (1, 2, 2, 3):
        report("operator", "a", sequence)
    assert len(reported()) == 1, "one that was refused has left none in its place"
    report("admin", "a", 4)
    report("operator", "b", 1)
    assert len(set(reported())) == len(reported()) == 3
    assert call("user", "POST", "/v1/gateways/a/usage", {"sequence": 5, "hours": []}).status_code == 403
    head.clock.ahead_s += 3601.0
    report("operator", "a", 5)
    assert len(reported()) == 5, "a refusal has a line of its own, and so has the next hour"
