"""One good file, made bad in every way that a disk, an editor or a stranger makes files bad."""

from __future__ import annotations

import gzip
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tests.hostile.numbers import EDGES

HUGE_BYTES = 80_000_000  # of a sparse file: over every limit, and nothing on the disk
BOMB_BYTES = 300_000_000  # that a gzip of 300 kB unpacks to


def contents(good: bytes, rng: random.Random, flips: int = 12) -> Iterator[tuple[str, bytes]]:
    """(what was done, the bytes). Bit flips are as many as asked for; all else comes once."""
    yield "empty", b""
    yield "blank", b" \n\t\n" * 20
    for part in (1, 2, 3):
        yield f"cut at {part}/4", good[: len(good) * part // 4]
    for number in range(flips):
        place, bit = rng.randrange(len(good)), rng.randrange(8)
        yield f"bit flip {number}", good[:place] + bytes((good[place] ^ 1 << bit,)) + good[place + 1 :]
    for number in range(flips // 2):
        place = rng.randrange(len(good))
        yield f"garbage {number}", good[:place] + rng.randbytes(5) + good[place + 5 :]
    yield "binary", rng.randbytes(3000)
    yield "zeros", b"\x00" * 5000
    yield "with BOM", b"\xef\xbb\xbf" + good
    yield "UTF-16", good.decode("utf-8", "replace").encode("utf-16")
    yield "Latin-1", good + "é".encode("latin-1")
    yield "lone surrogate in UTF-8", good + b"\xed\xa0\x80"
    yield "CRLF", good.replace(b"\n", b"\r\n")
    yield "NUL inside", good[:5] + b"\x00" + good[5:]
    yield "escape sequences", b"\x1b[2J\x1b]0;x\x07" + good
    yield "twice", good + good
    yield "one line of a million characters", good + b"x" * 1_000_000
    yield "long lines", good.replace(b":", b": " + b"9" * 5000, 1).replace(b",", b"," + b"9" * 5000, 1)
    yield "many lines", good + b"a: b\n" * 30_000
    yield "JSON, deep", b"[" * 100_000
    yield "JSON, deep mappings", b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    yield "YAML, deep", b"- " * 5000 + b"a\n"
    yield "YAML, flow deep", b"a: " + b"[" * 5000
    yield (
        "YAML bomb",
        b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(
            b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % ((110 + n, 110 + n) + (97 if n == 0 else 109 + n,) * 9)
            for n in range(9)
        ),
    )
    yield "YAML tag", b"!!python/object/apply:os.system ['true']\n" + good
    yield "YAML alias to itself", b"a: &a\n  b: *a\n"
    yield "a list", b"[1, 2, 3]\n"
    yield "a number", b"42\n"
    yield "null", b"null\n"
    yield "a JSON object", b'{"run": 3, "gpus": [], "": null, "queues": {}, "hidden_size": "x"}'
    yield "NaN", b'{"hidden_size": NaN, "num_hidden_layers": Infinity, "layouts": -Infinity}'
    yield "long number", b'{"hidden_size": ' + b"9" * 10_000 + b"}"
    yield "gzip", gzip.compress(good)
    yield "gzip, cut", gzip.compress(good)[:-5]


def at_edges(good: bytes) -> Iterator[tuple[str, bytes]]:
    """(what was done, the bytes): each number of the file at every edge, one after the other."""
    for number in re.finditer(rb"\d+(?:\.\d+)?", good):
        for edge in EDGES:
            yield f"{edge[:20]} at byte {number.start()}", good[: number.start()] + edge.encode() + good[number.end() :]


def places(good: bytes, folder: Path) -> Iterator[tuple[str, str]]:
    """(what it is, a path): things that are no file, or one that cannot be read to its end."""
    folder.mkdir()
    (folder / "folder").mkdir()
    yield "a folder", str(folder / "folder")
    os.mkfifo(folder / "pipe")
    yield "a pipe that nobody writes", str(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    yield "a link to itself", str(folder / "loop")
    (folder / "nowhere").symlink_to(folder / "nothing")
    yield "a link to nowhere", str(folder / "nowhere")
    (folder / "to_pipe").symlink_to(folder / "pipe")
    yield "a link to a pipe", str(folder / "to_pipe")
    yield "a name that is too long", str(folder / ("x" * 5000))
    yield "a name with NUL", str(folder / "a") + "\x00b"
    yield "a path below a file", f"{__file__}/below"
    yield "zeros without end", "/dev/zero"
    yield "a device that says nothing", "/dev/null"
    yield "memory", "/proc/self/mem"
    yield "an empty name", ""
    yield "a surrogate in the name", str(folder / "\udcff")
    with open(folder / "huge", "wb") as file:
        file.write(good)
        file.truncate(HUGE_BYTES)
    yield "huge", str(folder / "huge")
    with gzip.open(folder / "bomb.gz", "wb", compresslevel=1) as file:
        for _ in range(BOMB_BYTES // 1_000_000):
            file.write(b"\x00" * 1_000_000)
    yield "a gzip bomb", str(folder / "bomb.gz")
    if os.geteuid() != 0:
        (folder / "closed").write_bytes(good)
        (folder / "closed").chmod(0)
        yield "unreadable", str(folder / "closed")
