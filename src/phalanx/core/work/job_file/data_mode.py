"""How the datasets of a job reach its nodes."""

from __future__ import annotations

import enum


class DataMode(enum.StrEnum):
    """STAGE: a copy on each node's disk. STREAM: the job gets the address and reads by itself. MOUNT: a folder that reads the source on demand."""

    STAGE = "stage"
    STREAM = "stream"
    MOUNT = "mount"
