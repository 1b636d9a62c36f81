"""The training text: the sources of the Python standard library as bytes, equal on every rank and in every attempt."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}


def load(limit_bytes: int) -> torch.Tensor:
    """Return the first `limit_bytes` of the modules of the library, in the order of a hash of their names, as uint8.

    The order is fixed but mixed, so that a small limit does not select a single package.
    """
    parts: list[bytes] = []
    length = 0
    for path in _modules():
        content = path.read_bytes()
        parts.append(content)
        length += len(content)
        if length >= limit_bytes:
            break
    if length < 1_000_000:
        raise SystemExit(f"only {length} bytes of Python sources in {_library()}; use a complete Python installation")
    return torch.frombuffer(bytearray(b"".join(parts)[:limit_bytes]), dtype=torch.uint8)


def digest(text: torch.Tensor) -> str:
    """Return the SHA-256 of the text: nodes with different Python versions would train on different bytes."""
    return hashlib.sha256(text.numpy().tobytes()).hexdigest()


def batch(
    text: torch.Tensor, *, seed: int, step: int, samples: range, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of samples of a global batch, each (len(samples), length).

    A sample depends only on seed, step and its number in the global batch: a repeated step, even on another number of ranks, uses the
    same bytes.
    """
    rows = [_sample(text, seed, step, number, length) for number in samples]
    rows_BT = torch.stack(rows).long()
    return rows_BT[:, :-1], rows_BT[:, 1:]


def _sample(text: torch.Tensor, seed: int, step: int, number: int, length: int) -> torch.Tensor:
    key = hashlib.blake2b(f"{seed}/{step}/{number}".encode(), digest_size=8).digest()
    start = int.from_bytes(key, "little") % (len(text) - length - 1)
    return text[start : start + length + 1]


def _modules() -> Iterator[Path]:
    library = _library()
    found = [path for path in library.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(library).parts)]
    yield from sorted(found, key=lambda path: hashlib.sha256(str(path.relative_to(library)).encode()).digest())


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
