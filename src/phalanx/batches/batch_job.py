"""The job of a batch: the template of a service's revision, with the driver as its command and the requests as its upload."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Final

import msgspec

from phalanx.batches import driver
from phalanx.batches.input_check import InputCheck
from phalanx.core.errors import BadRequest, NotPermitted
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.services.service_use import BATCH_SERVICE_LABEL
from phalanx.core.work.spec import JobSpec
from phalanx.wire.api.jobs import JobKeysReply

LABEL: Final = "batch"  # every batch has it: the id of its file of requests
ENDPOINT_LABEL: Final = "batch.endpoint"
LINES_LABEL: Final = "batch.requests"
WINDOW_LABEL: Final = "batch.window"
METADATA_PREFIX: Final = "meta."
METADATA_MAX: Final = 16
AT_ONCE: Final = 128  # requests that the engine gets at once
PRIORITY: Final = -10_000  # the lowest
WINDOW_S: Final = 86_400.0
PACKED_BYTES_MAX: Final = 100 << 20  # of an upload to the head
_DRIVER: Final = "batch_driver.py"
_BLOCK: Final = tarfile.BLOCKSIZE
# What a replica needs of its node; the rest is how it is kept running.
_KEYS: Final = (
    "gpus",
    "nodes",
    "gpus_per_node",
    "share",
    "cpus",
    "memory",
    "resources",
    "env",
    "secrets",
    "setup",
    "software",
    "data",
    "image",
    "project",
    "queue",
    "nodelist",
    "exclude",
    "within",
    "prefer",
    "reservation",
)
_META_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,56}[A-Za-z0-9])?")


@dataclass(slots=True, kw_only=True)
class PackedBatch:
    """The upload of a batch, open at its start. `file` is an unnamed temporary file."""

    file: IO[bytes]
    sha256: str
    bytes: int

    def close(self) -> None:
        """Close and remove it."""
        self.file.close()


def check_template(service: str, reply: JobKeysReply) -> JobSpec:
    """Return the spec of a service, if a batch can start its engine.

    Raises:
        NotPermitted: the service has variables that only its owner sees.
        BadRequest: it cannot.
    """
    if reply.hidden_env:
        raise NotPermitted(
            f"a batch starts the command of service {service} with its variables, which only its owner may read",
            hint="ask its owner to run the batch",
        )
    spec = spec_from_mapping(reply.keys, workdir="/")
    why = ""
    if any((one.nodes or 1) > 1 for one in spec.role.gpus.choices):
        why = "a replica of it takes several nodes"
    elif spec.upload:
        why = "it runs in a copy of its folder, and a job has one copy only"
    elif spec.packages_file:
        why = f"it installs packages from {spec.packages_file}"
    elif spec.role.tasks_per_node != 1:
        why = f"it starts its command {spec.role.tasks_per_node} times on a node"
    if why:
        raise BadRequest(f"service {service} cannot run batches: {why}")
    return spec


def batch_keys(
    service: str, reply: JobKeysReply, upload: str, *, labels: Mapping[str, str], name: str
) -> dict[str, object]:
    """Return the keys of the job. `labels`: of the batch.

    Raises:
        NotPermitted, BadRequest: as `check_template`.
    """
    spec = check_template(service, reply)
    keys = {key: reply.keys[key] for key in _KEYS if key in reply.keys}
    if spec.role.gpus.total > 1 and spec.role.gpus.nodes is None:
        keys["nodes"] = 1
    return keys | {
        "name": name,
        "run": f"exec python3 {_DRIVER}",
        "workdir": "/",
        "upload": upload,
        "requirements": "none",
        "tasks_per_node": 1,
        "priority": PRIORITY,
        "preemptible": True,
        "saves_on_stop": True,
        "retry": 3,
        "labels": dict(labels),
    }


def batch_labels(
    check: InputCheck, file_id: str, *, window_s: float, metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the labels of a batch.

    Raises:
        BadRequest: a key or value of the metadata cannot be a label.
    """
    found = {
        LABEL: file_id,
        ENDPOINT_LABEL: check.endpoint,
        LINES_LABEL: str(check.lines),
        WINDOW_LABEL: f"{window_s:g}",
        BATCH_SERVICE_LABEL: check.model,
    }
    check_metadata(metadata or {})
    return found | {METADATA_PREFIX + key: value for key, value in (metadata or {}).items()}


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Check that metadata can be labels.

    Raises:
        BadRequest: it cannot.
    """
    if len(metadata) > METADATA_MAX:
        raise BadRequest(f"metadata: at most {METADATA_MAX} pairs")
    for key, value in metadata.items():
        if not _META_NAME.fullmatch(key):
            raise BadRequest(f"metadata: {key[:80]!r} is not a name of letters, digits and _./-, at most 58")
        if len(value) > 256 or not value.isprintable():
            raise BadRequest(f"metadata: the value of {key[:80]!r} is not printable text of at most 256 characters")


class BatchPacker:
    """Packs the requests while they are checked. `check` has the result afterwards."""

    def __init__(self, endpoint: str) -> None:
        self.check = InputCheck(endpoint=endpoint)
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="phalanx-batch-")  # noqa: SIM115  # `finish` hands it out

    def close(self) -> None:
        """Close and remove the file."""
        self._file.close()

    def pack_input(self, source: IO[bytes]) -> None:
        """Read the requests to their end."""
        self._file.write(bytes(_BLOCK))  # for the header, which needs the size
        with gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=1, mtime=0, filename="") as packed:
            for line in self.check.read(source):
                if not self.check.errors:
                    packed.write(line)
        size = self._file.tell() - _BLOCK
        self._file.seek(0)
        self._file.write(_header(driver.INPUT, size))
        self._file.seek(0, os.SEEK_END)
        self._pad()

    def finish(
        self, reply: JobKeysReply, *, batch: str, revision: int, expires_s: float, at_once: int = AT_ONCE
    ) -> PackedBatch:
        """Add what else the driver needs; the caller closes the result.

        Args:
            reply: keys of the service.
            batch: in the ids of the requests that the engine gets.
            revision: of the service.
            expires_s: Unix time after which no request is sent.
            at_once: requests that the engine gets at once.

        Raises:
            BadRequest: it is too large to upload.
            NotPermitted: as `check_template`.
        """
        spec = check_template(self.check.model, reply)
        assert spec.service is not None
        settings = {
            "batch": batch,
            "service": self.check.model,
            "revision": revision,
            "endpoint": self.check.endpoint,
            "lines": self.check.lines,
            "expires_s": expires_s,
            "at_once": at_once,
            "run": reply.keys["run"],
            "workdir": spec.workdir,
            "ready": spec.service.ready,
            "ready_within_s": spec.service.ready_within_s,
        }
        with open(driver.__file__, "rb") as program:
            self._add(_DRIVER, program.read())
        self._add(driver.SETTINGS, msgspec.json.encode(settings))
        self._file.write(bytes(2 * _BLOCK))
        size = self._file.tell()
        if size > PACKED_BYTES_MAX:
            raise BadRequest(
                f"the requests are {size >> 20} MiB when compressed; at most {PACKED_BYTES_MAX >> 20} MiB can be sent",
                hint="divide them into several files",
            )
        self._file.seek(0)
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()  # type: ignore[arg-type]
        self._file.seek(0)
        return PackedBatch(file=self._file, sha256=sha256, bytes=size)

    def _add(self, name: str, content: bytes) -> None:
        self._file.write(_header(name, len(content)) + content)
        self._pad()

    def _pad(self) -> None:
        self._file.write(bytes(-self._file.tell() % _BLOCK))


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.USTAR_FORMAT)
