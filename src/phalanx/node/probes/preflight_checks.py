"""Preflight checks of this node before a gang starts: disk, shared memory, matrix products, the links to its peers.

Cheap checks run each time. Expensive ones (a synced write, matrix products, a stream over a link) run once an hour, and again for a job
that restarts, since it has failed before. `node.logic.preflight_checks` holds the bounds; `preparation` refuses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from phalanx.core.fleet.fitness import DISK_FREE_BYTES, BadLink
from phalanx.core.ids import NodeId
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.work.allocation import NodeGrant
from phalanx.durable_files import time_durable_write
from phalanx.node.logic import preflight_checks as bounds
from phalanx.node.logic.preflight_checks import (
    DiskSpace,
    LinkProbe,
    MatmulProbe,
    WriteProbe,
)
from phalanx.node.probes.link_probe import is_loopback, probe_peer

PREFLIGHT_VARIABLE: Final = "PHALANX_PREFLIGHT"  # in a job's environment, "off" skips all checks
EXPENSIVE_EVERY_S: Final = 3600.0  # a fault in between is found by the job that it breaks
PRODUCT_S: Final = 60.0  # the import of torch from a cold disk, and a second of products
PRODUCT_PROGRAM: Final = "phalanx.torch.preflight"
_SHM: Final = "/dev/shm"  # noqa: S108  # only inspected, never written


class PreflightChecks:
    """The node's preflight checks; results are kept between jobs, so that expensive ones are rare. Thread-safe.

    Args:
        folder: the node folder, on the disk that jobs need.
        base: the environment of child processes.
        devices: UUIDs by index; empty if they are virtual.
        program: the Python module that multiplies matrices.
    """

    def __init__(
        self, *, folder: str, base: Mapping[str, str], devices: tuple[str, ...], program: str = PRODUCT_PROGRAM
    ) -> None:
        self._folder, self._base, self._devices, self._program = folder, base, devices, program
        self._lock = threading.Lock()
        self._passed_s: dict[str, float] = {}  # last success of each expensive check

    def full_disk(self) -> str:
        """Why the disk of the node's folder has no room for a job; empty if it has."""
        place = DiskSpace(path=self._folder, free_bytes=_free_bytes(self._folder), need_bytes=DISK_FREE_BYTES)
        return bounds.storage_problem([place], None)

    def node_fault(self, order: PrepareTasks, grant: NodeGrant) -> str:
        """The fault of the node itself, besides a full disk; empty if it has none."""
        if skipped(order):
            return ""
        places = []
        if self._devices and grant.devices and os.path.isdir(_SHM):
            places.append(DiskSpace(path=_SHM, free_bytes=_free_bytes(_SHM), need_bytes=bounds.SHM_FREE_BYTES))
        flaw = bounds.storage_problem(places, None)
        if not flaw and self._due("write", order):
            flaw = bounds.storage_problem(places, _written(self._folder))
            self._record("write", good=not flaw)
        if flaw or not (self._devices and grant.devices) or (grant.share is not None and grant.share.slices):
            return flaw  # a program cannot use a GPU with MIG mode on as a whole
        key = f"product {grant.devices}"
        if self._due(key, order):
            flaw = bounds.device_problem(self._products(grant))
            self._record(key, good=not flaw)
        return flaw

    def bad_links(self, order: PrepareTasks, grant: NodeGrant) -> tuple[BadLink, ...]:
        """The bad links to the gang's other nodes, in the order of their ranks. All are tested in parallel."""
        if skipped(order) or len(order.probe_ports) != len(order.addresses):
            return ()
        own, names = order.addresses[grant.node_rank], [one.node_id for one in order.allocation.grants]
        wanted = [
            rank
            for rank in bounds.probed_node_ranks(grant.node_rank, len(names))
            # Two nodes at one address are one machine: there is no link between them.
            if order.probe_ports[rank] and order.addresses[rank] != own and not is_loopback(order.addresses[rank])
        ]
        own_port = order.probe_ports[grant.node_rank]
        found: dict[int, LinkProbe] = {}

        def probe(rank: int) -> None:
            bulk = self._due(f"link {names[rank]}", order)
            found[rank] = probe_peer(
                names[rank], order.addresses[rank], order.probe_ports[rank], bulk=bulk, own_port=own_port
            )

        threads = [threading.Thread(target=probe, args=(rank,), name="probe", daemon=True) for rank in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tuple(
            self._bad_link(names[rank], found[rank]) for rank in sorted(found) if self._is_bad(names[rank], found[rank])
        )

    def _is_bad(self, name: NodeId, found: LinkProbe) -> bool:
        bad = bool(bounds.link_problem(found))
        if bad or found.returned_bytes > bounds.PIECE_BYTES:  # a single piece is not a stream test
            self._record(f"link {name}", good=not bad)
        return bad

    @staticmethod
    def _bad_link(name: NodeId, found: LinkProbe) -> BadLink:
        return BadLink(peer=name, why=bounds.link_problem(found))

    def _due(self, check: str, order: PrepareTasks) -> bool:
        with self._lock:
            passed_s = self._passed_s.get(check)
        return passed_s is None or order.restarts > 0 or time.monotonic() - passed_s > EXPENSIVE_EVERY_S

    def _record(self, check: str, *, good: bool) -> None:
        with self._lock:
            if good:
                self._passed_s[check] = time.monotonic()
            else:
                self._passed_s.pop(check, None)

    def _products(self, grant: NodeGrant) -> list[MatmulProbe]:
        """The results of a short-lived child process, which imports torch; none if torch is not installed."""
        if find_spec("torch") is None:
            return []
        seen = ",".join(self._devices[index] for index in grant.devices)
        argv = [sys.executable, "-P", "-m", self._program]
        try:
            done = subprocess.run(
                argv,
                env={**self._base, "CUDA_VISIBLE_DEVICES": seen},
                capture_output=True,
                text=True,
                timeout=PRODUCT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return [MatmulProbe(device=grant.devices[0], error=f"no answer in {PRODUCT_S:g} s")]
        return read_products(done.stdout, grant.devices)


def skipped(order: PrepareTasks) -> bool:
    """Whether the job skips the checks."""
    return dict(order.spec.env).get(PREFLIGHT_VARIABLE, "").lower() == "off"


def read_products(text: str, devices: tuple[int, ...]) -> list[MatmulProbe]:
    """Parse the child's output, one JSON object a line; other lines (of libraries) are skipped."""
    products = []
    for line in text.splitlines():
        try:
            result = json.loads(line)
            products.append(
                MatmulProbe(
                    device=devices[int(result["device"])],
                    flops=float(result.get("flops", 0.0)),
                    least_flops=float(result.get("least_flops", 0.0)),
                    error=str(result.get("error", "")),
                )
            )
        except (ValueError, KeyError, TypeError, IndexError):
            continue
    return products


def _free_bytes(path: str) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def _written(folder: str) -> WriteProbe:
    """Write, sync and remove a file there; returns the duration."""
    path = os.path.join(folder, f".preflight-{threading.get_ident()}")
    try:
        return WriteProbe(path=folder, seconds=time_durable_write(path, bytes(bounds.WRITE_BYTES)))
    except OSError as error:
        return WriteProbe(path=folder, error=error.strerror or str(error))
