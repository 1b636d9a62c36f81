"""Saves which replica has read which prefixes, so that a gateway that starts again routes as before.

Each gateway of a machine writes a file of its own every few seconds, and reads the files of all when it starts: what its siblings sent is in the
same caches. A file counts only for replicas that are still the same: the same job at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from array import array
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

import msgspec
import xxhash

from phalanx.durable_files import replace_file
from phalanx.gateway.services import RoutedService, ServiceTable

SAVE_EVERY_S: Final = 5.0
WORK_SHARE: Final = 20  # saving takes at most 1/20 of the time
OLD_S: Final = 3600.0  # caches have other content after this
START_S: Final = 60.0  # in which replicas may be listed after a gateway starts: its head may start with it
SIBLINGS_MAX: Final = 64
FILE_BYTES_MAX: Final = 32 << 20  # of one gateway; services that do not fit begin without
READ_BYTES_MAX: Final = 32 << 20  # of all files, which takes about two seconds
CHUNK: Final = 20_000  # entries in one step, which holds up other work for about a millisecond


class SavedGeneration(msgspec.Struct, frozen=True, array_like=True):
    """One generation of an index: hashes (8 bytes each), the number of each one's set of slots (4 bytes each), and the sets as bits."""

    hashes: bytes
    set_numbers: bytes
    sets: list[bytes]


class SavedIndex(msgspec.Struct, frozen=True, array_like=True):
    """The index of one service. `replicas`: job, address and slot of each."""

    service: str
    replicas: list[tuple[str, str, int]]
    generations: list[SavedGeneration]


_decoder: Final = msgspec.msgpack.Decoder(list[SavedIndex])
_CHECK_BYTES: Final = 8


def pack_generation(known: Mapping[int, int]) -> SavedGeneration:
    """Return the bytes of a generation, which nothing else changes meanwhile."""
    hashes, numbers = array("Q"), array("I")
    seen: dict[int, int] = {}
    pairs = iter(known.items())
    while part := list(islice(pairs, CHUNK)):
        hashes.extend([one for one, _ in part])
        numbers.extend([seen.setdefault(bits, len(seen)) for _, bits in part])
    return SavedGeneration(hashes.tobytes(), numbers.tobytes(), [_bytes_of(bits) for bits in seen])


def unpack_generation(saved: SavedGeneration, slots: Mapping[int, int]) -> dict[int, int]:
    """Return a generation with new slots by old ones; what belongs to no new slot is left out.

    Raises:
        ValueError: the bytes do not fit together.
    """
    hashes, numbers = array("Q"), array("I")
    hashes.frombytes(saved.hashes)
    numbers.frombytes(saved.set_numbers)
    if len(hashes) != len(numbers) or (numbers and max(numbers) >= len(saved.sets)):
        raise ValueError("the parts of a saved index do not fit together")
    sets = [_moved(int.from_bytes(one), slots) for one in saved.sets]
    found = dict(zip(hashes, map(sets.__getitem__, numbers), strict=True))
    return found if all(sets) else {one: bits for one, bits in found.items() if bits}


def _bytes_of(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8)


def _moved(bits: int, slots: Mapping[int, int]) -> int:
    found = 0
    while bits:
        lowest = bits & -bits
        slot = slots.get(lowest.bit_length() - 1)
        found |= 0 if slot is None else 1 << slot
        bits ^= lowest
    return found


class PrefixFiles:
    """The files of the gateways of one folder.

    Args:
        table: the services.
        folder: of the files; "" for none.
    """

    def __init__(self, table: ServiceTable, folder: str) -> None:
        self._table, self._folder = table, folder
        self._lock = -1
        self._path = ""
        self._saved_changes: dict[str, int] = {}
        self._found: list[SavedIndex] = []  # of all files, the newest first
        self._restored: set[tuple[str, str]] = set()
        self._until_s = 0.0
        self._writing = threading.Lock()  # a stop may come during a save

    def open(self) -> None:
        """Take a file that no other gateway writes, and read all. Files that cannot be read are ignored: they only save time."""
        if not self._folder:
            return
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            self._path = self._take_file()
        left = READ_BYTES_MAX
        for path in self._recent_files():
            content = _read(path, left)
            left -= len(content)
            with contextlib.suppress(msgspec.MsgspecError):
                self._found += _decoder.decode(content) if content else []
        self._table.added = self._restore
        self._until_s = time.monotonic() + START_S

    def _take_file(self) -> str:
        for number in range(SIBLINGS_MAX):
            path = os.path.join(self._folder, str(number))
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            self._lock = lock  # until the process ends, however it ends
            return path
        return ""

    def _recent_files(self) -> list[str]:
        found, now_s = [], time.time()
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for one in entries:
                if one.name.isdigit() and one.is_file(follow_symlinks=False):
                    changed_s = one.stat().st_mtime
                    if now_s - changed_s < OLD_S:
                        found.append((changed_s, one.path))
        return [path for _, path in sorted(found, reverse=True)]

    def _restore(self, service: RoutedService, jobs: set[str]) -> None:
        """Give a service what the files say of replicas that were added; of each once, as one that comes again has an empty cache."""
        if time.monotonic() > self._until_s:
            self._found, self._table.added = [], lambda _service, _jobs: None
        name = str(service.view.name)
        for saved in self._found:
            slots = {
                slot: service.replicas[job_id].slot
                for job_id, url, slot in saved.replicas
                if saved.service == name
                and job_id in jobs
                and (name, job_id) not in self._restored
                and service.replicas[job_id].url == url
            }
            if slots:
                with contextlib.suppress(ValueError):
                    service.prefixes.merge([unpack_generation(one, slots) for one in saved.generations])
        self._restored.update((name, job_id) for job_id in jobs)

    async def run(self) -> None:
        """Save until cancelled, and then once more."""
        try:
            while True:
                began_s = time.monotonic()
                await self.save()
                await asyncio.sleep(max(SAVE_EVERY_S, (time.monotonic() - began_s) * WORK_SHARE))
        finally:
            self._write(self._copies())

    async def save(self) -> None:
        """Save what has changed since the last time."""
        changes = {name: one.prefixes.changes for name, one in self._table.services.items()}
        if self._path and changes != self._saved_changes:
            copies = self._copies()
            await asyncio.to_thread(self._write, copies)
            self._saved_changes = changes

    def _copies(self) -> list[tuple[str, list[tuple[str, str, int]], list[dict[int, int]]]]:
        return [
            (name, [(one.job_id, one.url, one.slot) for one in service.replicas.values()], service.prefixes.copies())
            for name, service in self._table.services.items()
            if len(service.prefixes) and len(service.replicas) > 1
        ]

    def _write(self, copies: Iterable[tuple[str, list[tuple[str, str, int]], list[dict[int, int]]]]) -> None:
        if not self._path:
            return
        saved: list[SavedIndex] = []
        size = 0
        for name, replicas, generations in copies:
            packed = [pack_generation(one) for one in generations]
            size += sum(
                len(one.hashes) + len(one.set_numbers) + sum(map(len, one.sets)) + 9 * len(one.sets) for one in packed
            )
            if size > FILE_BYTES_MAX:
                break
            saved.append(SavedIndex(name, replicas, packed))
        content = msgspec.msgpack.encode(saved)
        check = xxhash.xxh3_64_digest(content)
        with self._writing, contextlib.suppress(OSError):  # only a restart needs it
            replace_file("", self._path, check + content)


def _read(path: str, most: int) -> bytes:
    """Return the content of a file; nothing if it is not whole, or larger than `most` bytes."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        content = file.read(most + _CHECK_BYTES)
        if content[:_CHECK_BYTES] == xxhash.xxh3_64_digest(content[_CHECK_BYTES:]):
            return content[_CHECK_BYTES:]
    return b""
