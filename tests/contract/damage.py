"""Ways in which a database on a disk may be damaged, numbered, each the same for the same number. Pure: bytes in, bytes out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PAGE = 4096
FRAME = PAGE + 24  # a frame of the WAL: its header and one page
WAL_HEADER = 32
DATABASE_HEADER = 100
FLIPS_OF_DATABASE = 2400
FLIPS_OF_WAL = 1200
BOTH = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The files of a damaged copy. `earlier`: it may open as a whole earlier state, since its WAL is what was damaged."""

    what: str
    database: bytes
    wal: bytes | None = None
    shm: bytes | None = None
    lock: bytes | None = None
    earlier: bool = False


def copies(closed: bytes, database: bytes, wal: bytes) -> Iterator[Copy]:
    """All damaged copies of one database, in a fixed order.

    Args:
        closed: the file of a store that was closed: all is in it.
        database, wal: the files of the same store while it was open: what came last is in the WAL alone.
    """
    yield from _cut(closed)
    yield from _pages(closed)
    yield from _flipped(closed)
    yield from _beside(closed)
    yield from _wal_cut(database, wal)
    yield from _wal_flipped(database, wal)
    yield from _both(database, wal)


def _cut(whole: bytes) -> Iterator[Copy]:
    """At each boundary of a page, a byte before it and behind it, and at each boundary of a sector of the first pages."""
    sizes = {at + shift for at in range(0, len(whole), PAGE) for shift in (-1, 0, 1)} | set(range(0, 4 * PAGE, 512))
    for size in sorted(size for size in sizes if 0 < size < len(whole)):
        yield Copy(what=f"cut to {size} bytes", database=whole[:size])


def _pages(whole: bytes) -> Iterator[Copy]:
    """Each page lost, half lost, or written in the place of another."""
    count = len(whole) // PAGE
    for page in range(count):
        at = page * PAGE
        for name, content in (
            ("zeros", bytes(PAGE)),
            ("half zeros", whole[at : at + PAGE // 2] + bytes(PAGE // 2)),
            ("ones", b"\xff" * PAGE),
            ("noise", random.Random(page).randbytes(PAGE)),
            ("the next page", whole[(page + 1) % count * PAGE :][:PAGE]),
            ("an older page", whole[page // 2 * PAGE :][:PAGE]),
        ):
            if content != whole[at : at + PAGE]:
                yield Copy(what=f"page {page + 1} is {name}", database=whole[:at] + content + whole[at + PAGE :])


def _flipped(whole: bytes) -> Iterator[Copy]:
    """Every bit of the header, then bits anywhere, half of them in the first bytes of a page, where the tree is."""
    for at in range(DATABASE_HEADER):
        for bit in range(8):
            yield Copy(what=f"bit {bit} of byte {at}", database=_flip(whole, at, bit))
    for number in range(FLIPS_OF_DATABASE):
        dice = random.Random(number)
        at = dice.randrange(len(whole))
        if number % 2:
            at = at - at % PAGE + dice.randrange(64)
        bit = dice.randrange(8)
        yield Copy(what=f"bit {bit} of byte {at}", database=_flip(whole, at, bit))


def _beside(whole: bytes) -> Iterator[Copy]:
    """Files beside the database that are not what they should be."""
    for number in range(40):
        noise = random.Random(number).randbytes(PAGE * (1 + number % 8))
        yield Copy(what=f"noise {number} as -shm", database=whole, shm=noise)
        yield Copy(what=f"noise {number} as -wal", database=whole, wal=noise)
        yield Copy(what=f"noise {number} as -wal and -shm", database=whole, wal=noise, shm=noise)
        yield Copy(what=f"noise {number} in the lock file", database=whole, lock=noise)
    yield Copy(what="an empty -wal", database=whole, wal=b"")
    yield Copy(what="an empty -shm", database=whole, shm=b"")


def _wal_cut(database: bytes, wal: bytes) -> Iterator[Copy]:
    sizes = {at + shift for at in range(WAL_HEADER, len(wal), FRAME) for shift in (-1, 0, 1, 23, 24, 25, 2048)}
    for size in sorted(size for size in sizes | set(range(WAL_HEADER + 1)) if size < len(wal)):
        yield Copy(what=f"WAL cut to {size} bytes", database=database, wal=wal[:size], earlier=True)


def _wal_flipped(database: bytes, wal: bytes) -> Iterator[Copy]:
    """Each byte of its header and of each frame's header, then bits anywhere; and frames that are lost or stale."""
    places = [*range(WAL_HEADER), *(at + byte for at in range(WAL_HEADER, len(wal), FRAME) for byte in range(24))]
    for number, at in enumerate(places):
        yield Copy(
            what=f"WAL: bit {number % 8} of byte {at}", database=database, wal=_flip(wal, at, number % 8), earlier=True
        )
    for number in range(FLIPS_OF_WAL):
        dice = random.Random(number)
        at, bit = dice.randrange(len(wal)), dice.randrange(8)
        yield Copy(what=f"WAL: bit {bit} of byte {at}", database=database, wal=_flip(wal, at, bit), earlier=True)
    for at in range(WAL_HEADER, len(wal) - FRAME, FRAME):
        lost = wal[:at] + bytes(FRAME) + wal[at + FRAME :]
        yield Copy(what=f"WAL: the frame at {at} is zeros", database=database, wal=lost, earlier=True)
        swapped = wal[:at] + wal[at + FRAME : at + 2 * FRAME] + wal[at : at + FRAME] + wal[at + 2 * FRAME :]
        yield Copy(what=f"WAL: the frame at {at} is the next", database=database, wal=swapped, earlier=True)


def _both(database: bytes, wal: bytes) -> Iterator[Copy]:
    """Bits of the database below its WAL, which may cover them."""
    for number in range(BOTH):
        dice = random.Random(number)
        at, bit = dice.randrange(len(database)), dice.randrange(8)
        yield Copy(what=f"under the WAL: bit {bit} of byte {at}", database=_flip(database, at, bit), wal=wal)


def _flip(whole: bytes, at: int, bit: int) -> bytes:
    damaged = bytearray(whole)
    damaged[at] ^= 1 << bit
    return bytes(damaged)
