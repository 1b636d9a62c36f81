"""What a head has acknowledged, and whether it still holds: kept by the client's side, compared with the next life of the head."""

from __future__ import annotations

import glob
import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cluster import wait_until
from tests.crash.armed_head import ArmedHead, Refused

TALK_LINES = 40
OPEN = ("running", "pending")  # states in which a job stays until it is cancelled
SETTLE_S = 60.0  # a guard against hanging
KEPT_ENTRIES = 8  # of each table, looked at again in the lives that follow
SEEN_JOBS = 400  # the newest that a look at the list sees; one life submits fewer


@dataclass(slots=True)
class Submitted:
    """One submit. `id` is empty until it is acknowledged; `ends` names the state that it must end in."""

    name: str
    body: dict[str, Any]
    ends: str = "succeeded"
    id: str = ""
    array_id: str = ""


@dataclass(slots=True)
class Ledger:
    """Everything that was acknowledged. What was asked for and not answered is asked again after a death, and stands in no table until then.

    Attributes:
        owed: submits that were not answered.
        tokens: secrets of tokens that were made; None after their end was acknowledged.
        records: path of a GET, the list in its reply, and the fields that the entry of an id must have.
        blobs: uploads.
        outputs: bytes of files of the outputs, by path below the home; the job's folder without its random key.
        checkpoints: whole copies of live attempts: what a supervisor asks with, and the manifest.
    """

    head: ArmedHead
    jobs: dict[str, Submitted] = field(default_factory=dict)
    owed: dict[str, Submitted] = field(default_factory=dict)
    tokens: dict[str, tuple[str, bool]] = field(default_factory=dict)
    records: dict[tuple[str, str], dict[str, dict[str, Any]]] = field(default_factory=dict)
    blobs: set[str] = field(default_factory=set)
    outputs: dict[str, bytes] = field(default_factory=dict)
    checkpoints: dict[tuple[str, str], bytes] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)

    def submit(self, wanted: Submitted) -> str:
        """Submit a job by its name as the key; its id once that is acknowledged."""
        self.owed[wanted.name] = wanted
        body = {"workdir": "/", "name": wanted.name, **wanted.body}
        reply = self.head.ask("POST", "/v1/jobs", body, key=wanted.name)
        found: str = reply["job"]["id"]
        assert not wanted.id or wanted.id == found, f"{wanted.name}: the same key gave {wanted.id}, then {found}"
        wanted.id, wanted.array_id = found, reply.get("array_id") or ""
        self.jobs[wanted.name] = self.owed.pop(wanted.name)
        return found

    def remember(self, listed: tuple[str, str], key: str, fields: dict[str, Any]) -> None:
        """An acknowledged record: `listed` is the path and the word under which its list comes."""
        self.records.setdefault(listed, {})[key] = fields

    def ask_again(self) -> None:
        """What a client does when its head comes back: send again what was not answered, and, to be sure, the last that was."""
        for wanted in [*self.owed.values(), *list(self.jobs.values())[-2:]]:
            self.submit(wanted)
        for wanted in self.jobs.values():
            if wanted.name in self.unsure:
                self.head.ask("POST", f"/v1/jobs/{wanted.id}/cancel", {"why": "asked again"})
                self.unsure.discard(wanted.name)

    def verify(self) -> None:
        """Compare all with the head as it is now; jobs that are to end are awaited.

        Raises:
            AssertionError: something acknowledged is lost, doubled, or not as it was acknowledged.
        """
        self._records_hold()
        self._tokens_hold()
        for sha256 in self.blobs:
            self.head.ask("HEAD", f"/v1/blobs/{sha256}")
        for path, content in self.outputs.items():
            folder, job_id, name = path.split("/", 2)
            (stored,) = glob.glob(os.path.join(self.head.home, folder, f"{job_id}-*", name))
            with open(stored, "rb") as file:
                assert file.read() == content, f"{path} is not what was acknowledged"
        for (node, asked), manifest in self.checkpoints.items():
            assert self.head.as_node(node, "PUT", asked, manifest)["complete"], asked
        self._jobs_hold()
        wait_until(lambda: not self.head.orphans(), f"no orphan is left: {self.head.orphans()}", limit_s=SETTLE_S)

    def wind_up(self) -> None:
        """Cancel what would run on, and forget what has been compared: the tables stay small over many lives."""
        self.checkpoints.clear()
        for wanted in self.jobs.values():
            if wanted.ends in OPEN:
                self.head.ask("POST", f"/v1/jobs/{wanted.id}/cancel", {"why": "compared"})
                assert self.head.wait_for_state(wanted.id, "succeeded", "failed", "cancelled")["state"] == "cancelled"
        for table in (self.jobs, self.tokens, self.outputs):
            for name in list(table)[:-KEPT_ENTRIES]:
                del table[name]
        for wanted in self.jobs.values():
            wanted.ends = "cancelled" if wanted.ends in OPEN else wanted.ends

    def _records_hold(self) -> None:
        for (path, word), wanted in self.records.items():
            found = {entry["id"]: entry for entry in self.head.ask("GET", path)[word]}
            for key, fields in wanted.items():
                if key in self.unsure:
                    continue
                seen = {name: found.get(key, {}).get(name) for name in fields}
                assert seen == fields, f"{path} {key}: {seen}, acknowledged was {fields}"

    def _tokens_hold(self) -> None:
        for token_id, (secret, good) in self.tokens.items():
            if token_id in self.unsure:
                continue
            opens = self._opens(secret)
            assert opens == good, (
                f"token {token_id} {'opens' if opens else 'opens nothing'}, acknowledged was the other"
            )

    def _opens(self, secret: str) -> bool:
        try:
            self.head.ask("GET", "/v1/me", token=secret)
        except Refused as refused:
            if refused.status != 401:
                raise
            return False
        return True

    def _jobs_hold(self) -> None:
        """Each is there once, ends as it has to, ran once or never, and left no process."""
        listed = self.head.ask("GET", f"/v1/jobs?limit={SEEN_JOBS}")["jobs"]
        for wanted in self.jobs.values():
            same = [job["id"] for job in listed if job["name"] == wanted.name]
            size = elements_of(wanted)
            assert len(same) == size, f"{wanted.name} is there as {same}"
            if wanted.array_id:
                self._array_holds(wanted)
                continue
            view = self._ended(wanted.id, wanted)
            assert view["state"] == wanted.ends, f"{wanted.name}: {view}"
            self._ran(wanted.id, wanted)
            if "talk" in wanted.name and wanted.ends == "succeeded":
                self._said_all(wanted.id)
        live = {one.id for one in self.jobs.values() if one.ends == "running"}
        wait_until(
            lambda: self.head.jobs_with_processes() <= live, "no process of an ended job is left", limit_s=SETTLE_S
        )

    def _ended(self, job_id: str, wanted: Submitted) -> dict[str, Any]:
        if wanted.ends in OPEN:
            return self.head.wait_for_state(job_id, wanted.ends)
        return self.head.wait_for_state(job_id, "succeeded", "failed", "cancelled", "timeout")

    def _array_holds(self, wanted: Submitted) -> None:
        for index in range(elements_of(wanted)):
            element = f"{wanted.array_id}_{index}"
            view = self._ended(element, wanted)
            assert view["state"] == wanted.ends, view
            self._ran(view["id"], wanted)

    def _ran(self, job_id: str, wanted: Submitted) -> None:
        """Each job writes a line where it begins: one of a job that ran, none of one that was cancelled while it waited."""
        count = lines_in(os.path.join(f"{self.head.home}.ran", job_id))
        if wanted.ends == "succeeded":
            assert count == 1, f"{wanted.name}, job {job_id}, ran {count} times"
        elif "held" in wanted.name:
            assert count == 0, f"{wanted.name}, job {job_id}, ran after its cancel was acknowledged"

    def _said_all(self, job_id: str) -> None:
        text, cursor = "", ""
        while True:
            reply = self.head.ask("GET", f"/v1/jobs/{job_id}/logs?rank=0&cursor={cursor}")
            text += "".join(chunk["text"] for chunk in reply["chunks"])
            cursor = reply["cursor"]
            if not reply["more"]:
                break
        assert text == spoken(), f"job {job_id} said {text[-200:]!r}"


def elements_of(wanted: Submitted) -> int:
    """How many jobs a submit makes."""
    return int(str(wanted.body["array"]).rpartition("-")[2]) + 1 if "array" in wanted.body else 1


def spoken() -> str:
    """What a job that talks says."""
    return "".join(f"line {number} of {TALK_LINES}\n" for number in range(TALK_LINES))


def lines_in(path: str) -> int:
    """Of a file; 0 without one."""
    try:
        with open(path, encoding="ascii") as file:
            return len(file.readlines())
    except FileNotFoundError:
        return 0


def sha256_of(content: bytes) -> str:
    """In hex."""
    return hashlib.sha256(content).hexdigest()
