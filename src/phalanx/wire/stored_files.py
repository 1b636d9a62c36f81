"""Messages between supervisor and head about checkpoints and outputs that the head stores, because nodes do not share its folders.

    GET  storage                                                  -> StorageReply   to test whether this node sees the head's folders
    PUT  checkpoints/manifest ?job_id epoch step digest   bytes   -> CheckpointUploadReply      begins or resumes an upload
    PUT  checkpoints/file     ?job_id epoch step digest path offset  bytes -> FileEndReply
    GET  checkpoints          ?job_id epoch step digest wait_s    -> CheckpointUploadReply      bytes still missing; waits for a change
    GET  checkpoints/file     ?job_id epoch of_epoch step path offset -> bytes      of a published checkpoint
    GET  outputs              ?job_id epoch                       -> OutputsReply
    PUT  outputs/file         ?job_id epoch path offset [more | size crc32 mode]  bytes -> FileEndReply
    GET  outputs/file         ?job_id epoch path                  -> bytes
    DELETE outputs/file       ?job_id epoch path                  -> 204

Routes are under /v1/node/. `epoch` is always the sender's live epoch. A piece must start at the end of the head's file; at another offset
the head only replies with its end, from which the sender continues.
"""

from __future__ import annotations

from typing import Final

import msgspec

PIECE_BYTES_MAX: Final = 4 << 20  # of one request: takes at most 30 s on a slow link, and is large against its overhead
OUTPUT_FILES_MAX: Final = 20_000  # per job; listing them takes about 0.1 s
NONCE_FILE: Final = ".phalanx-head"  # in each of the head's root folders


class StorageReply(msgspec.Struct, frozen=True, kw_only=True):
    """The head's folders, and the content of the file NONCE_FILE in each: a node that reads the same there shares them."""

    checkpoint_root: str
    output_root: str
    nonce: str


class CheckpointUploadReply(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a checkpoint the head has.

    Attributes:
        complete: every file is verified and durable under its final name.
        missing_bytes: still missing, from all nodes.
        sizes: sizes of files that the head has completely or in part; other files are missing. Only in the reply to a manifest.
        lost_node: the node that was lost before it sent its files, so that the checkpoint stays incomplete.
    """

    complete: bool
    missing_bytes: int
    sizes: dict[str, int] = {}
    lost_node: str = ""


class FileEndReply(msgspec.Struct, frozen=True, kw_only=True):
    """The current end of the head's file."""

    end: int


class OutputFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a job's outputs: `path` at the head, `name` on the requesting node. Both are relative."""

    path: str
    name: str
    size_bytes: int


class OutputsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The output files that a node of a new attempt downloads."""

    files: list[OutputFile]
