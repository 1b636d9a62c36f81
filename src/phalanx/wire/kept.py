"""What a supervisor and the head say to each other about files that the head keeps, because nodes do not share its folders.

    GET  storage                                                  -> StorageReply   does this node see the head's folders?
    PUT  checkpoints/manifest ?job_id epoch step digest   bytes   -> KeptReply      begin, or begin again
    PUT  checkpoints/file     ?job_id epoch step digest path offset  bytes -> TakenReply
    GET  checkpoints          ?job_id epoch step digest wait_s    -> KeptReply      what is still missing; waits for less
    GET  checkpoints/file     ?job_id epoch of_epoch step path offset -> bytes      from a published one
    GET  outputs              ?job_id epoch                       -> OutputsReply
    PUT  outputs/file         ?job_id epoch path offset [more | size crc32 mode]  bytes -> TakenReply
    GET  outputs/file         ?job_id epoch path                  -> bytes
    DELETE outputs/file       ?job_id epoch path                  -> 204

Routes lie under /v1/node/. `epoch` is always the live one of whoever asks. A piece goes to the place at which the head's file ends: whoever
sends another place is told the end, and goes on from there.
"""

from __future__ import annotations

from typing import Final

import msgspec

PIECE_BYTES_MAX: Final = (
    4 << 20
)  # one request: small enough for 30 s on a slow link, large enough that its answer costs nothing
OUTPUT_FILES_MAX: Final = 20_000  # of a job; a look at them all takes some 0.1 s
NONCE_FILE: Final = ".phalanx-head"  # in each of the head's roots


class StorageReply(msgspec.Struct, frozen=True, kw_only=True):
    """The head's folders, and what it has written into the file NONCE_FILE of each: who reads the same there sees them."""

    checkpoint_root: str
    output_root: str
    nonce: str


class KeptReply(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a checkpoint the head holds.

    Attributes:
        whole: every file is there, compared and durable, under its final name.
        missing_bytes: what is still to come, from all nodes.
        ends: how far it holds files that it holds in part or whole; those without are empty. Only in the answer to a manifest.
        lost: the node that was lost before its files were here: it will never be whole.
    """

    whole: bool
    missing_bytes: int
    ends: dict[str, int] = {}
    lost: str = ""


class TakenReply(msgspec.Struct, frozen=True, kw_only=True):
    """Where the file ends at the head now."""

    end: int


class OutputFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a job's outputs: `path` where the head has it, `name` under which the node that asks is to have it. Both are relative."""

    path: str
    name: str
    size_bytes: int


class OutputsReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a node of a new attempt is to find among its outputs."""

    files: list[OutputFile]
