"""The head's verbs as methods. Records of wire.api come back; what `submit` and `run` need on their way loads no msgspec.

client = Client()
done = client.submit({"run": ["python", "train.py"], "gpus": 8, "workdir": "/home/ada/project"})
for event in client.follow_logs(done.id): ...
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import quote, urlencode

from phalanx.client.following import Event, follow
from phalanx.client.transport import ANSWER_S, PATIENCE_S, REPLY_TIMEOUT_S, Retry, Transport, unreachable
from phalanx.core.errors import BadRequest, TooLarge, Unreachable, WaitTimedOut

if TYPE_CHECKING:
    from phalanx.wire import api
    from phalanx.wire.why import DryRunReply, WhyReply
else:

    class _Records:
        """`phalanx.wire.api`, loaded when a record of it is first needed: msgspec and core's records cost 40 ms of a command's start."""

        def __getattr__(self, name: str) -> object:
            from phalanx.wire import api

            return getattr(api, name)

    api = _Records()

T = TypeVar("T")

BODY_BYTES_MAX: Final = 1 << 20  # the head takes no larger job; told here before it is sent
WHY_S: Final = 60.0  # for one answer to `why`: eight may be before it, each of some seconds on the largest fleet
_ARRAY_POLL_S: Final = 0.5  # between looks at an array that is waited for
_COPY_BYTES: Final = 1 << 18
_ID: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # of a user, project, queue, token or reservation


class Submission:
    """A job that was taken, or an array: `id` names the whole. `notes` is what the user is told: shape and number of tasks."""

    __slots__ = ("_payload", "id", "notes")

    def __init__(self, payload: bytes) -> None:
        said = json.loads(payload)
        self._payload = payload
        self.id: str = said.get("array_id") or said["job"]["id"]
        self.notes: list[str] = said["notes"]

    @property
    def job(self) -> api.JobView:
        """The job as it was taken; of an array its first element."""
        return _record(self._payload, api.Submitted).job


class Client:
    """One head. Without arguments the one of this user's PHALANX_HOME, or PHALANX_URL and PHALANX_TOKEN. Threads may share it.

    Args:
        url: of the head.
        token: of the caller.
        home: state folder to look in instead of PHALANX_HOME.
        patience_s: how long a head that was reached before is waited for.
        answer_s: how long a short call may take.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: str | None = None,
        patience_s: float = PATIENCE_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.transport = Transport(url, token, home=home, patience_s=patience_s, answer_s=answer_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this thread's connection."""
        self.transport.drop()

    # ---- the head and the caller -----------------------------------------------------------------------------------------

    def health(self) -> api.Health:
        """Which head answers."""
        return self._get("/v1/health", api.Health)

    def me(self) -> api.Me:
        """Whose token this is."""
        return self._get("/v1/me", api.Me)

    def overview(self) -> api.Overview:
        """Nodes, running and pending jobs at one moment."""
        return self._get("/v1/overview", api.Overview)

    def metrics(self) -> str:
        """The text that Prometheus reads."""
        return self.transport.json("GET", "/metrics").decode()

    def stop(self, *, keep_jobs: bool = False, cancel_jobs: bool = False) -> api.StopReply:
        """Stop the head; with `cancel_jobs` call again until `stopping`."""
        body = {"keep_jobs": keep_jobs, "cancel_jobs": cancel_jobs}
        return _record(self._post("/v1/stop", body, again=True), api.StopReply)

    # ---- jobs ------------------------------------------------------------------------------------------------------------

    def submit(self, job: Mapping[str, object], *, key: str | None = None) -> Submission:
        """Submit a job: the keys of a job file. Durable when this returns; sent again under one key if the head restarts.

        Raises:
            BadFile, BadRequest, NeverFits, TooLarge: the head does not take it.
        """
        try:
            body = json.dumps(job, separators=(",", ":"), ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise BadRequest(f"the job cannot be written as JSON: {error}") from error
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(
                f"the job is {len(body)} bytes of JSON; a head takes {BODY_BYTES_MAX}", hint="put the data into files"
            )
        headers = {"Idempotency-Key": key or os.urandom(16).hex(), "Content-Type": "application/json"}
        return Submission(self.transport.send("POST", "/v1/jobs", body, again=True, headers=headers))

    def jobs(
        self,
        *,
        state: Iterable[str] = (),
        user: str | None = None,
        project: str | None = None,
        queue: str | None = None,
        name: str | None = None,
        before_seq: int | None = None,
        limit: int = 100,
        fold: bool = False,
    ) -> api.JobList:
        """One page of jobs, newest first; `next` of the reply goes into `before_seq`. `fold`: an array's waiting elements are one."""
        asked = [("state", str(word)) for word in state]
        rest = {
            "user": user,
            "project": project,
            "queue": queue,
            "name": name,
            "before_seq": before_seq,
            "limit": limit,
            "fold": 1 if fold else None,
        }
        return self._get("/v1/jobs" + _query(rest, asked), api.JobList)

    def job(self, job_id: str) -> api.JobDetail:
        """One job with its attempts; of an array all elements as one job, with how many are in each state."""
        return self._get(f"/v1/jobs/{_name(job_id)}", api.JobDetail)

    def update(self, job_id: str, **changes: str | float | None) -> api.JobView:
        """Change name, priority, time ("2h"), queue or begin ("2h" from now, or Unix seconds)."""
        given = {name: value for name, value in changes.items() if value is not None}
        payload = self.transport.json("PATCH", f"/v1/jobs/{_name(job_id)}", _encode(given))
        return _record(payload, api.JobReply).job

    def cancel(self, job_id: str, why: str = "") -> api.JobView:
        """End a job for good."""
        return self._change(job_id, "cancel", {"why": why})

    def hold(self, job_id: str) -> api.JobView:
        """Keep a pending job from starting."""
        return self._change(job_id, "hold")

    def release(self, job_id: str) -> api.JobView:
        """Let a held job start."""
        return self._change(job_id, "release")

    def requeue(self, job_id: str) -> api.JobView:
        """Save, stop and wait again."""
        return self._change(job_id, "requeue")

    def why(self, job_id: str) -> WhyReply:
        """Why a job waits, who is in the way, when it is expected to start, and what would start it now."""
        from phalanx.wire.why import WhyReply

        payload = self.transport.json("GET", f"/v1/jobs/{_name(job_id)}/why", timeout_s=WHY_S)
        return _record(payload, WhyReply)

    def dry_run(self, job: Mapping[str, object]) -> DryRunReply:
        """What a job would meet if it were submitted now; nothing is written.

        Raises:
            BadFile, BadRequest, NeverFits, TooLarge: the head would not take it.
        """
        from phalanx.wire.why import DryRunReply

        payload = self.transport.json("POST", "/v1/jobs/dry-run", _encode(job), again=True, timeout_s=WHY_S)
        return _record(payload, DryRunReply)

    def story(self, job_id: str, *, after: int = 0, limit: int = 1000) -> api.StoryReply:
        """What happened to a job."""
        return self._get(f"/v1/jobs/{_name(job_id)}/story" + _query({"after": after, "limit": limit}), api.StoryReply)

    def whole_story(self, *, after: int = 0, node: str | None = None, limit: int = 500) -> api.StoryReply:
        """What happened to all jobs and nodes, or to one node."""
        return self._get("/v1/story" + _query({"after": after, "node": node, "limit": limit}), api.StoryReply)

    def steps(self, job_id: str, *, after: str = "", rank: str = "0", limit: int = 10_000) -> api.StepsReply:
        """Steps as reported; `cursor` of the reply goes into `after`."""
        asked = {"after": after or None, "rank": rank, "limit": limit}
        return self._get(f"/v1/jobs/{_name(job_id)}/steps" + _query(asked), api.StepsReply)

    def receipt(self, job_id: str) -> dict[str, Any]:
        """What a job used and lost: the fields of core.accounting.receipt.Receipt."""
        receipt: dict[str, Any] = json.loads(self.transport.json("GET", f"/v1/jobs/{_name(job_id)}/receipt"))
        return receipt

    def wait(self, job_id: str, timeout_s: float | None = None) -> api.JobView:
        """The job once it is over.

        Raises:
            WaitTimedOut: it was not within `timeout_s`; the job goes on.
        """
        began = self.transport.now()
        job = self.job(job_id).job
        if job.states:  # an array has no story of its own to follow
            while not job.state.terminal:
                if timeout_s is not None and self.transport.now() - began > timeout_s:
                    raise WaitTimedOut(f"job {job_id} is not over after {timeout_s:g} s", hint=f"phalanx show {job_id}")
                time.sleep(_ARRAY_POLL_S)
                job = self.job(job_id).job
            return job
        for _ in self.follow_events(job_id):
            if timeout_s is not None and self.transport.now() - began > timeout_s:
                raise WaitTimedOut(f"job {job_id} is not over after {timeout_s:g} s", hint=f"phalanx attach {job_id}")
        return self.job(job_id).job

    # ---- output ----------------------------------------------------------------------------------------------------------

    def logs(
        self,
        job_id: str,
        *,
        rank: str = "all",
        epoch: int | None = None,
        cursor: str = "",
        tail_bytes: int | None = None,
    ) -> api.LogsReply:
        """One page of output; `cursor` of the reply goes on."""
        asked = {"rank": rank, "epoch": epoch, "cursor": cursor or None, "tail_bytes": tail_bytes}
        return self._get(f"/v1/jobs/{_name(job_id)}/logs" + _query(asked), api.LogsReply)

    def follow_logs(
        self,
        job_id: str,
        *,
        rank: str = "all",
        epoch: int | None = None,
        cursor: str = "",
        tail_bytes: int | None = None,
    ) -> Iterator[Event]:
        """Output as it comes: `log`, `state` and at last `end` events, without gap or double over restarts of head and job."""
        asked = {"follow": 1, "rank": rank, "epoch": epoch, "tail_bytes": tail_bytes}
        return follow(self.transport, f"/v1/jobs/{_name(job_id)}/logs" + _query(asked), cursor=cursor)

    def follow_events(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """What happens to a job: `story`, `state` and at last `end` events."""
        return follow(self.transport, f"/v1/jobs/{_name(job_id)}/events", cursor=str(after) if after else "")

    def follow_all(self, *, after: int | None = None) -> Iterator[Event]:
        """What happens to everything, from now on or from after a seq. It never ends by itself."""
        return follow(self.transport, "/v1/events", cursor="" if after is None else str(after))

    def files(self, job_id: str, path: str = "") -> api.FilesReply:
        """One folder of a job's outputs."""
        return self._get(f"/v1/jobs/{_name(job_id)}/files" + _query({"path": path or None}), api.FilesReply)

    def fetch_archive(self, job_id: str, out: IO[bytes], path: str = "") -> int:
        """Write a tar archive of a job's outputs to `out`; answers its size in bytes.

        Raises:
            Unreachable: it broke off; what was written is not whole.
        """
        path = f"/v1/jobs/{_name(job_id)}/files/archive" + _query({"path": path or None})
        reply, written = self._open(path), 0
        try:
            while piece := reply.read(_COPY_BYTES):
                out.write(piece)
                written += len(piece)
        except http.client.HTTPException as error:
            raise unreachable(self.transport, error) from error
        finally:
            reply.close()
        return written

    # ---- exec ------------------------------------------------------------------------------------------------------------

    def exec(
        self, job_id: str, argv: Sequence[str], *, tty: bool = False, rows: int = 24, cols: int = 80, node_rank: int = 0
    ) -> str:
        """Start a command beside a job's ranks; answers the session's name."""
        body = {"argv": list(argv), "tty": tty, "rows": rows, "cols": cols, "node_rank": node_rank}
        session: str = json.loads(self._post(f"/v1/jobs/{_name(job_id)}/exec", body))["session"]
        return session

    def exec_output(self, session: str, after: int, *, wait_s: float = 20.0) -> api.ExecOutputReply:
        """What it printed from byte `after` on."""
        path = f"/v1/exec/{_name(session)}/output" + _query({"after": after, "wait_s": wait_s})
        return _record(self.transport.json("GET", path, timeout_s=REPLY_TIMEOUT_S), api.ExecOutputReply)

    def exec_input(self, session: str, offset: int, data: bytes = b"", *, closed: bool = False) -> int:
        """Type into it; answers up to which byte the input is taken."""
        import base64

        body = {"offset": offset, "data": base64.b64encode(data).decode(), "closed": closed}
        end: int = json.loads(self._post(f"/v1/exec/{_name(session)}/input", body, again=True))["end"]
        return end

    def exec_resize(self, session: str, rows: int, cols: int) -> None:
        """Tell it the terminal's new size."""
        self._post(f"/v1/exec/{_name(session)}/resize", {"rows": rows, "cols": cols}, again=True)

    def exec_close(self, session: str) -> None:
        """Leave it."""
        self.transport.json("DELETE", f"/v1/exec/{_name(session)}")

    # ---- nodes -----------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[api.NodeView]:
        """All nodes."""
        return self._get("/v1/nodes", api.NodeList).nodes

    def node(self, node_id: str) -> api.NodeView:
        """One node."""
        return self._get(f"/v1/nodes/{_name(node_id)}", api.NodeReply).node

    def drain(self, node_id: str, why: str = "", *, cordon_only: bool = False) -> api.NodeView:
        """Keep new work off a node, and move its jobs unless `cordon_only`."""
        body = {"why": why, "cordon_only": cordon_only}
        return _record(self._post(f"/v1/nodes/{_name(node_id)}/drain", body, again=True), api.NodeReply).node

    def undrain(self, node_id: str) -> api.NodeView:
        """Let a node take work again."""
        return _record(self._post(f"/v1/nodes/{_name(node_id)}/undrain", None, again=True), api.NodeReply).node

    def label_nodes(self, labels: Mapping[str, Mapping[str, str]]) -> list[api.NodeView]:
        """Label nodes; an empty text takes a label away. All of them or none; what they are now."""
        return _record(self.transport.json("PATCH", "/v1/nodes", _encode({"labels": labels})), api.NodeList).nodes

    def forget_node(self, node_id: str) -> None:
        """Remove a node that is down and holds nothing."""
        self.transport.json("DELETE", f"/v1/nodes/{_name(node_id)}")

    # ---- reservations ----------------------------------------------------------------------------------------------------

    def reservations(self) -> list[api.ReservationView]:
        """All that have not ended, first to begin first."""
        return self._get("/v1/reservations", api.ReservationList).reservations

    def reserve(
        self,
        reservation_id: str,
        nodes: Sequence[str],
        time: str,
        *,
        start_s: float | None = None,
        users: Sequence[str] = (),
        queues: Sequence[str] = (),
        maintenance: bool = False,
        why: str = "",
    ) -> api.ReservationView:
        """Set nodes aside for `time` ("4h") from `start_s` (Unix seconds; None for now), for users and queues or for maintenance."""
        body = {
            "nodes": list(nodes), "time": time, "start_s": start_s, "users": list(users), "queues": list(queues),
            "maintenance": maintenance, "why": why,
        }  # fmt: skip
        path = f"/v1/reservations/{_id('reservation', reservation_id)}"
        return _record(self._put(path, body), api.ReservationReply).reservation

    def unreserve(self, reservation_id: str) -> None:
        """Give the nodes of a reservation back."""
        self.transport.json("DELETE", f"/v1/reservations/{_id('reservation', reservation_id)}")

    # ---- what a calibration found ------------------------------------------------------------------------------------------

    def profile(self) -> api.ProfileReply:
        """What the last calibration found of this fleet; `core.performance.profile.profile_from` reads it."""
        return self._get("/v1/profile", api.ProfileReply)

    def put_profile(self, profile: Mapping[str, object]) -> api.ProfileReply:
        """Keep a profile in place of the one that is kept."""
        return _record(self._put("/v1/profile", profile), api.ProfileReply)

    # ---- users, projects, queues, tokens -----------------------------------------------------------------------------------

    def users(self) -> list[api.UserView]:
        """All users."""
        return self._get("/v1/users", api.UserList).users

    def put_user(self, user_id: str, *, role: str | None = None, disabled: bool | None = None) -> api.UserView:
        """Add a user or change one."""
        return _record(
            self._put(f"/v1/users/{_id('user', user_id)}", {"role": role, "disabled": disabled}), api.UserReply
        ).user

    def projects(self) -> list[api.ProjectView]:
        """All projects."""
        return self._get("/v1/projects", api.ProjectList).projects

    def put_project(
        self, project_id: str, *, members: Sequence[str] | None = None, admins: Sequence[str] | None = None
    ) -> api.ProjectView:
        """Add a project or change one."""
        body = {"members": members, "admins": admins}
        return _record(self._put(f"/v1/projects/{_id('project', project_id)}", body), api.ProjectReply).project

    def queues(self) -> list[api.QueueView]:
        """All queues."""
        return self._get("/v1/queues", api.QueueList).queues

    def queue(self, queue_id: str) -> api.QueueView:
        """One queue."""
        return self._get(f"/v1/queues/{_id('queue', queue_id)}", api.QueueReply).queue

    def put_queues(
        self, queues: Sequence[api.QueueFacts], *, prune: bool = False, dry_run: bool = False
    ) -> api.QueuesApplied:
        """Put queues at once, all or nothing; `prune` removes the others. Says what changed, or with `dry_run` what would."""
        import msgspec

        body = {"queues": [msgspec.to_builtins(queue) for queue in queues], "prune": prune, "dry_run": dry_run}
        return _record(self._put("/v1/queues", body), api.QueuesApplied)

    def put_queue(self, queue_id: str, *, priority: int | None = None, open: bool | None = None) -> api.QueueView:  # noqa: A002
        """Add a queue or change one."""
        return _record(
            self._put(f"/v1/queues/{_id('queue', queue_id)}", {"priority": priority, "open": open}), api.QueueReply
        ).queue

    def tokens(self) -> list[api.TokenView]:
        """One's tokens; all of them for an admin."""
        return self._get("/v1/tokens", api.TokenList).tokens

    def make_token(
        self, *, user: str | None = None, expires: str | None = None, scope: Sequence[str] = (), note: str = ""
    ) -> api.TokenMade:
        """Make a token; its secret is shown this once."""
        body = {"user": user, "expires": expires, "scope": list(scope), "note": note}
        return _record(self._post("/v1/tokens", body), api.TokenMade)

    def revoke_token(self, token_id: str) -> None:
        """End a token."""
        self.transport.json("DELETE", f"/v1/tokens/{_id('token', token_id)}")

    # ---- uploads ---------------------------------------------------------------------------------------------------------

    def has_blob(self, sha256: str) -> bool:
        """Whether an upload is there already."""
        from phalanx.core.errors import NotFound

        try:
            self.transport.json("HEAD", f"/v1/blobs/{_name(sha256)}")
        except NotFound:
            return False
        return True

    def upload(self, file: IO[bytes], sha256: str, size_bytes: int) -> None:
        """Send bytes unless the head has them. `file` is read from where it stands."""
        if self.has_blob(sha256):
            return
        headers = {"Content-Length": str(size_bytes), "Content-Type": "application/octet-stream"}
        path = f"/v1/blobs/{_name(sha256)}"
        self.transport.send("PUT", path, file, again=False, headers=headers, timeout_s=REPLY_TIMEOUT_S)

    def _open(self, path: str) -> http.client.HTTPResponse:
        retry = Retry(self.transport)
        while True:
            try:
                return self.transport.open(path, {})
            except (OSError, http.client.HTTPException, Unreachable) as error:
                retry.after(error, again=True)

    # ---- below -----------------------------------------------------------------------------------------------------------

    def _get(self, path: str, kind: type[T]) -> T:
        return _record(self.transport.json("GET", path), kind)

    def _post(self, path: str, body: Mapping[str, object] | None, *, again: bool = False) -> bytes:
        return self.transport.json("POST", path, _encode(body) if body is not None else b"", again=again)

    def _put(self, path: str, body: Mapping[str, object]) -> bytes:
        return self.transport.json("PUT", path, _encode(body))

    def _change(self, job_id: str, verb: str, body: Mapping[str, object] | None = None) -> api.JobView:
        # Cancel, hold, release and requeue are idempotent while the same attempt lives: sent again they change nothing more.
        payload = self._post(f"/v1/jobs/{_name(job_id)}/{verb}", body, again=verb != "requeue")
        return _record(payload, api.JobReply).job


def _record(payload: bytes, kind: type[T]) -> T:
    import msgspec

    return msgspec.json.decode(payload, type=kind)


def _encode(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _query(asked: Mapping[str, object], more: Sequence[tuple[str, str]] = ()) -> str:
    pairs = [*more, *((name, str(value)) for name, value in asked.items() if value is not None)]
    return "?" + urlencode(pairs) if pairs else ""


def _name(text: str) -> str:
    """A name as one segment of a path.

    Raises:
        BadRequest: it is empty or would be read as more than a name.
    """
    if not text or text in (".", ".."):
        raise BadRequest(f"{text!r} is no name")
    return quote(text, safe="")


def _id(kind: str, text: str) -> str:
    """The id of a user, project, queue or token as one segment of a path.

    Raises:
        BadRequest: no such thing can have this name.
    """
    if not _ID.fullmatch(text):
        raise BadRequest(f"{text[:80]!r} is no name of a {kind}", hint="1 to 64 letters, digits and . _ @ -")
    return _name(text)
