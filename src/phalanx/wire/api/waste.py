"""Records of the list of waste."""

from __future__ import annotations

import msgspec


class WasteRowView(msgspec.Struct, frozen=True, kw_only=True):
    """A job that wastes GPUs now, or a node with devices that cannot be used.

    Attributes:
        kind: unoccupied, idle, hung, low, data_bound, communicating or crash_loop of a job; broken or fragmented of a node.
        alarm: whether it lasts longer than its threshold, `after_s`.
        job: its id, with name, user, project and queue; empty for a node.
        service: of a replica.
        nodes: on which, at most 8; `nodes_more` counts the others.
        gpus: that are wasted, of `gpus_held` of the job or node.
        since_s: Unix time.
        gpu_hours: wasted so far; `gpu_us` in GPU-microseconds.
        advice: the reason in a sentence.
        hint, hint_code, hint_args: what mends it (decision 0042); `command` is empty here, and filled in by the command line.
    """

    kind: str
    alarm: bool
    gpus: float
    gpus_held: float
    since_s: float
    after_s: float
    gpu_hours: float
    gpu_us: int
    advice: str
    hint: str
    hint_code: str
    hint_args: dict[str, str]
    job: str = ""
    name: str = ""
    user: str = ""
    project: str = ""
    queue: str = ""
    service: str = ""
    nodes: list[str] = []
    nodes_more: int = 0
    model: str = ""
    command: str = ""


class WasteView(msgspec.Struct, frozen=True, kw_only=True):
    """Waste now, the most GPU-hours first. `at_s`: when it was last looked at; 0 before the first look.

    Attributes:
        alarms: rows that are alarms, of all that the filters select.
        gpus, gpu_hours: of all that they select, also of rows that are left out. A GPU counts once for each row that has it.
        left_off: rows past the limit.
    """

    at_s: float
    rows: list[WasteRowView]
    alarms: int
    gpus: float
    gpu_hours: float
    left_off: int = 0
