"""The fleet's stream over HTTP: the same compressed bytes for many pages, and a page that slept gets what it missed."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import contextlib
import json

from tests.contract.api_head import Supervisor, bearer


@contextlib.contextmanager
def following(call, last_id=""):
    """The events of an open page, as (kind, id, record)."""
    headers = {**bearer("viewer"), "accept-encoding": "gzip", **({"last-event-id": last_id} if last_id else {})}
    with call.client.stream("GET", "/v1/fleet/events", headers=headers, timeout=60) as reply:
        assert reply.headers["content-encoding"] == "gzip"

        def events():
            kind = mark = ""
            for line in reply.iter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("id: "):
                    mark = line[4:]
                elif line.startswith("data: "):
                    yield kind, mark, json.loads(line[6:])

        yield events()


def cordon(call, verb, body=None):
    assert call("operator", "POST", f"/v1/nodes/n0/{verb}", body).status_code == 200


def test_page_that_slept_gets_the_changes_that_it_missed_and_no_whole_frame(call):
    Supervisor(call).hello()
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(following(call)) for _ in range(20)]
        frames = [next(other) for other in others]
        assert all(frame == frames[0] for frame in frames)
        kind, mark, frame = frames[0]
        assert (kind, frame["states"]) == ("frame", ["up"])
        cordon(call, "drain", {"why": "fan", "cordon_only": True})
        changes = [next(other) for other in others]
        assert all(change == changes[0] for change in changes)
        with following(call, mark) as missed:  # its connection broke after the frame
            assert next(missed) == changes[0]
            cordon(call, "undrain")
            kind, _, delta = next(missed)
            assert (kind, [node[1] for node in delta["nodes"]]) == ("delta", ["up"])
