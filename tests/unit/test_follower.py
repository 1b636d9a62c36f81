"""What a head answers that does not lead, and what one that leads keeps to itself once it does no longer."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from phalanx.api.http.follower import FollowerApp, LeaderOnlyMiddleware
from phalanx.ports.election import HeadRecord, Leader

MINE = HeadRecord(name="b", head_id="b", url="http://b:1", version="1")


@dataclass
class Place:
    """A place among heads; `leading` is asked in turn, the last answer stays."""

    row: Leader = field(default_factory=lambda: Leader(term=4, beat=7, holder="a", url="http://a:1"))
    leading: list[bool] = field(default_factory=lambda: [True])
    term: int = 4
    own_record: HeadRecord = MINE

    def leads(self) -> bool:
        return self.leading.pop(0) if len(self.leading) > 1 else self.leading[0]

    def leader(self) -> Leader:
        return self.row

    def heads(self) -> list[HeadRecord]:
        return [MINE]

    def urls(self) -> list[str]:
        return [MINE.url]

    def relieved(self) -> bool:
        return False


def ask(app: Any, path: str, method: str = "GET") -> tuple[int, Any]:
    said: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(app({"type": "http", "method": method, "path": path, "headers": []}, receive, send))
    body = b"".join(message.get("body", b"") for message in said[1:])
    return said[0]["status"], json.loads(body) if body.startswith(b"{") else body


async def created(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b'{"job":"7"}'})


def test_standby_names_the_leader_and_does_nothing():
    status, body = ask(FollowerApp(Place(), version="1"), "/v1/jobs", "POST")
    assert (status, body["error"]["code"], body["error"]["leader"]) == (503, "not_leading", "http://a:1")


def test_standby_says_that_it_is_well():
    status, body = ask(FollowerApp(Place(), version="1"), "/v1/health")
    assert (status, body["role"], body["leader"], body["term"]) == (200, "standby", "http://a:1", 4)


def test_standby_gives_its_ca_to_who_wants_to_trust_it():
    assert ask(FollowerApp(Place(), version="1", ca_pem="PEM"), "/v1/ca") == (200, b"PEM")
    assert ask(FollowerApp(Place(), version="1"), "/v1/ca")[0] == 503


def test_nobody_is_named_while_nobody_leads():
    status, body = ask(FollowerApp(Place(row=Leader(term=4, beat=8)), version="1"), "/v1/jobs")
    assert (status, body["error"]["leader"]) == (503, "")


def test_leader_is_not_sent_to_itself_when_its_own_row_still_stands():
    row = Leader(term=4, beat=7, holder="b", url="http://b:1")
    assert ask(FollowerApp(Place(row=row), version="1"), "/v1/jobs")[1]["error"]["leader"] == ""


def test_answer_of_a_leader_goes_out():
    assert ask(LeaderOnlyMiddleware(created, Place()), "/v1/jobs") == (201, {"job": "7"})


def test_answer_made_before_and_sent_after_the_term_is_kept_back():
    status, body = ask(LeaderOnlyMiddleware(created, Place(leading=[True, False])), "/v1/jobs")
    assert (status, body["error"]["code"]) == (503, "not_leading")


def test_what_was_done_before_the_term_ended_is_not_said_to_be_undone():
    """A client repeats what nothing came of: a second token, a second requeue."""
    status, body = ask(LeaderOnlyMiddleware(created, Place(leading=[True, False])), "/v1/tokens", "POST")
    assert (status, body["error"]["code"], body["error"]["retry"]) == (503, "outcome_unknown", False)
    assert (
        ask(LeaderOnlyMiddleware(created, Place(leading=[False])), "/v1/tokens", "POST")[1]["error"]["code"]
        == "not_leading"
    )


def test_stream_breaks_off_when_the_term_is_over():
    with pytest.raises(ConnectionAbortedError):
        ask(LeaderOnlyMiddleware(created, Place(leading=[True, True, False])), "/v1/jobs")
