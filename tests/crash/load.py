"""What is done to a head until it dies: each round passes every write of a serving head at least once."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import zlib
from dataclasses import dataclass, field
from urllib.parse import urlencode

from benchmarks.cluster import wait_until
from phalanx.wire import manifest as manifests
from tests.crash.armed_head import ArmedHead, Refused
from tests.crash.ledger import TALK_LINES, Ledger, Submitted, sha256_of

TRIES_MAX = 50  # of a call that is told to try later
BUSY = (429, 503)


@dataclass(slots=True)
class Load:
    """Rounds of one client, and of the supervisors of a gang that share no folder with the head."""

    head: ArmedHead
    ledger: Ledger
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    begun: tuple[Submitted, int] | None = None  # a checkpoint that an earlier life of the head has half of

    def round(self) -> None:
        """All kinds of request once."""
        number = next(self.numbers)
        if self.begun is not None:
            self._begin(*self.begun)
        gang = self._gang(number)
        self._jobs(number)
        self._people(number)
        self._upload(number)
        self._kept(gang, number)
        self._outputs(gang, number)
        self._cancel(gang)

    def drip(self) -> None:
        """A job that says a line twenty times a second: the next head finds its stream begun."""
        says = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); sleep 0.05; done"
        job = Submitted(
            name=f"drip-{next(self.numbers)}", body={"run": says, "gpus": 1, "tasks_per_node": 1}, ends="running"
        )
        self.again(self.ledger.submit, job)
        wait_until(lambda: self.head.ask("GET", f"/v1/jobs/{job.id}/logs?rank=0")["chunks"], "it drips")

    def leave_half(self) -> None:
        """A checkpoint that this head takes half of, and the next one is asked to go on with."""
        number = next(self.numbers)
        self.begun = (self._gang(number), number)
        about, _ = self._begin(*self.begun)
        where = urlencode({**about, "path": "a.bin", "offset": 0})
        self.again(self.head.as_node, "n0", "PUT", f"/v1/node/checkpoints/file?{where}", b"the first half")

    def _begin(self, gang: Submitted, number: int) -> tuple[dict[str, object], bytes]:
        about, encoded = checkpoint(gang.id, number + 1, {"a.bin": b"the first half, and the second"})
        self.again(self.head.as_node, "n0", "PUT", f"/v1/node/checkpoints/manifest?{urlencode(about)}", encoded)
        return about, encoded

    def jobs_alone(self) -> None:
        """Jobs that end by themselves, on however small a fleet."""
        self._jobs(next(self.numbers))

    def _gang(self, number: int) -> Submitted:
        gang = Submitted(name=f"gang-{number}", body={"run": ["sleep", "100000"], "gpus": "2x1"}, ends="running")
        self.again(self.ledger.submit, gang)
        wait_until(lambda: self.head.job(gang.id)["state"] == "running", "the gang runs")
        return gang

    def _jobs(self, number: int) -> None:
        ran = f"{self.head.home}.ran"
        os.makedirs(ran, exist_ok=True)
        begin = f"echo ran >> {ran}/$PHALANX_JOB_ID"
        talk = f"{begin}; i=0; while [ $i -lt {TALK_LINES} ]; do echo line $i of {TALK_LINES}; i=$((i+1)); done"
        for kind, body in (
            ("true", {"run": f"{begin}; true", "tasks_per_node": 1}),
            ("talk", {"run": talk, "tasks_per_node": 1}),
            ("array", {"run": begin, "array": "0-2", "tasks_per_node": 1}),
        ):
            self.again(self.ledger.submit, Submitted(name=f"{kind}-{number}", body={"gpus": 1, **body}))
        for kind, body in (
            ("long", {"run": "sleep 100000", "tasks_per_node": 1}),
            ("held", {"run": begin, "tasks_per_node": 1, "begin": time.time() + 1e6}),
        ):
            job = Submitted(
                name=f"{kind}-{number}", body={"gpus": 1, **body}, ends="running" if kind == "long" else "pending"
            )
            self.again(self.ledger.submit, job)
            self._cancel(job)

    def _cancel(self, job: Submitted) -> None:
        """Whether an unanswered one was heard is not known: it is asked again in the next life."""
        job.ends = "cancelled"
        self.ledger.unsure.add(job.name)
        for asked in [key for key in self.ledger.checkpoints if f"job_id={job.id}&" in key[1]]:
            del self.ledger.checkpoints[asked]
        self.again(self.head.ask, "POST", f"/v1/jobs/{job.id}/cancel", {"why": "the drill"})
        self.ledger.unsure.discard(job.name)

    def _people(self, number: int) -> None:
        ledger, ask = self.ledger, self.head.ask
        for listed, key, path, body in (
            (("/v1/users", "users"), f"user-{number % 5}", "/v1/users/", {"role": "user", "disabled": number % 2 == 0}),
            (
                ("/v1/projects", "projects"),
                f"project-{number % 5}",
                "/v1/projects/",
                {"members": [f"user-{number % 5}"]},
            ),
            (("/v1/queues", "queues"), f"queue-{number % 5}", "/v1/queues/", {"priority": number % 100}),
        ):
            ledger.unsure.add(key)
            self.again(ask, "PUT", path + key, body)
            ledger.remember(listed, key, body)
            ledger.unsure.discard(key)
        made = self.again(ask, "POST", "/v1/tokens", {"note": f"token {number}"})
        ledger.tokens[made["token"]["id"]] = (made["secret"], True)
        if number % 2:
            self._revoke(made["token"]["id"])

    def _revoke(self, token_id: str) -> None:
        self.ledger.unsure.add(token_id)
        self.again(self.head.ask, "DELETE", f"/v1/tokens/{token_id}")
        self.ledger.tokens[token_id] = (self.ledger.tokens[token_id][0], False)
        self.ledger.unsure.discard(token_id)

    def _upload(self, number: int) -> None:
        content = f"archive {number} ".encode() * 5000
        self.again(self.head.ask, "PUT", f"/v1/blobs/{sha256_of(content)}", content)
        self.ledger.blobs.add(sha256_of(content))
        with contextlib.suppress(Refused):  # other bytes than its name says: taken back
            self.head.ask("PUT", f"/v1/blobs/{sha256_of(b'other')}", content)

    def _kept(self, gang: Submitted, number: int) -> None:
        """Two nodes bring one checkpoint, after another of the same step was begun and given up."""
        content = {"a.bin": f"weights {number} ".encode() * 1000, "sub/b.bin": b"optimiser" * 100, "empty.bin": b""}
        for attempt in ("given up", "kept"):
            about, encoded = checkpoint(gang.id, number + 1, {**content, "note.bin": attempt.encode()})
            asked = f"/v1/node/checkpoints/manifest?{urlencode(about)}"
            reply = self.again(self.head.as_node, "n0", "PUT", asked, encoded)
            for at, (path, whole) in enumerate({**content, "note.bin": attempt.encode()}.items()):
                if attempt == "given up" and path != "note.bin":
                    continue
                half = len(whole) // 2
                for offset, piece in ((0, whole[:half]), (half, whole[half:])):
                    if reply["sizes"].get(path, 0) <= offset and piece:
                        where = urlencode({**about, "path": path, "offset": offset})
                        self.again(self.head.as_node, f"n{at % 2}", "PUT", f"/v1/node/checkpoints/file?{where}", piece)
            if attempt == "kept":
                assert self.again(self.head.as_node, "n0", "GET", f"/v1/node/checkpoints?{urlencode(about)}")[
                    "complete"
                ]
                self.ledger.checkpoints["n0", asked] = encoded
                self._begun_anew(gang, number)

    def _begun_anew(self, gang: Submitted, number: int) -> None:
        """A whole copy that nobody published makes room for another of its step; what is begun and never ends is swept behind the gang."""
        for key in [key for key in self.ledger.checkpoints if f"job_id={gang.id}&" in key[1]]:
            del self.ledger.checkpoints[key]
        about, encoded = checkpoint(gang.id, number + 1, {"a.bin": b"other bytes"})
        self.again(self.head.as_node, "n0", "PUT", f"/v1/node/checkpoints/manifest?{urlencode(about)}", encoded)
        where = urlencode({**about, "path": "a.bin", "offset": 0})
        self.again(self.head.as_node, "n0", "PUT", f"/v1/node/checkpoints/file?{where}", b"other")
        about, encoded = checkpoint(gang.id, number + 2, {"a.bin": b"whole"})
        asked = f"/v1/node/checkpoints/manifest?{urlencode(about)}"
        self.again(self.head.as_node, "n0", "PUT", asked, encoded)
        where = urlencode({**about, "path": "a.bin", "offset": 0})
        self.again(self.head.as_node, "n0", "PUT", f"/v1/node/checkpoints/file?{where}", b"whole")
        self.ledger.checkpoints["n0", asked] = encoded

    def _outputs(self, gang: Submitted, number: int) -> None:
        """Files of two nodes: replaced, made longer, under one name, removed, sent with wrong bytes, left on the way."""
        text = f"result {number}\n".encode()
        self._bring(gang, "n1", "both.txt", text + b"of n1")
        self._bring(gang, "n0", "both.txt", text + b"of n0", moves="both.txt.node-1")
        self._bring(gang, "n0", "sub/deep/c.txt", text)
        self._longer(gang, "n0", "sub/deep/c.txt", text, b"and more\n")
        self._bring(gang, "n0", "gone/d.txt", text)
        self.ledger.outputs.pop(f"outputs/{gang.id}/gone/d.txt")
        self.again(self.head.as_node, "n0", "DELETE", f"/v1/node/outputs/file?{urlencode(place(gang, 'gone/d.txt'))}")
        wrong = urlencode({**place(gang, "wrong.txt"), "offset": 0, "crc32": 1, "size": len(text), "mode": 0o600})
        with contextlib.suppress(Refused):
            self.head.as_node("n0", "PUT", f"/v1/node/outputs/file?{wrong}", text)
        half = urlencode({**place(gang, "half.txt"), "offset": 0})
        self.again(self.head.as_node, "n0", "PUT", f"/v1/node/outputs/file?{half}", text)

    def _bring(self, gang: Submitted, node: str, path: str, content: bytes, *, moves: str = "") -> None:
        known = self.ledger.outputs
        about = {**place(gang, path), "offset": 0, "crc32": zlib.crc32(content), "size": len(content), "mode": 0o640}
        taken = known.pop(f"outputs/{gang.id}/{path}", None)
        self.again(self.head.as_node, node, "PUT", f"/v1/node/outputs/file?{urlencode(about)}", content)
        known[f"outputs/{gang.id}/{path}"] = content
        if moves and taken is not None:
            known[f"outputs/{gang.id}/{moves}"] = taken

    def _longer(self, gang: Submitted, node: str, path: str, content: bytes, more: bytes) -> None:
        known = self.ledger.outputs
        known.pop(f"outputs/{gang.id}/{path}")
        about = urlencode({**place(gang, path), "offset": len(content), "more": "true"})
        self.again(self.head.as_node, node, "PUT", f"/v1/node/outputs/file?{about}", more)
        known[f"outputs/{gang.id}/{path}"] = content + more

    def again(self, call, *words):
        """A call; one that is told to try later tries again, as the client does."""
        for _ in range(TRIES_MAX):
            try:
                return call(*words)
            except Refused as refused:
                if refused.status not in BUSY:
                    raise
                time.sleep(0.02)
        raise AssertionError(f"told to try later {TRIES_MAX} times: {words}")


def place(gang: Submitted, path: str) -> dict[str, object]:
    """Of a file of the gang's outputs."""
    return {"job_id": gang.id, "epoch": 1, "path": path}


def checkpoint(job_id: str, step: int, content: dict[str, bytes]) -> tuple[dict[str, object], bytes]:
    """What a supervisor says of a checkpoint, and its manifest."""
    files = tuple(
        manifests.ManifestFile(path=path, size_bytes=len(data), crc32=zlib.crc32(data))
        for path, data in content.items()
    )
    encoded = manifests.encode(
        manifests.CheckpointManifest(format=manifests.MANIFEST_FORMAT, step=step, epoch=1, world_size=2, files=files)
    )
    return {"job_id": job_id, "epoch": 1, "step": step, "digest": manifests.digest(encoded)}, encoded
