"""Which devices of this machine an engine has assigned to a supervisor, by the variables that the engine sets."""

from __future__ import annotations

import os
from typing import Final

_CUDA_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_DEVICES: Final = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")


def assigned_devices(count: int) -> list[int]:
    """Return the positions of the assigned devices in the driver's list.

    CUDA's own variable has priority: if the engine hides the other devices, it numbers the remaining ones.
    """
    for name in (_CUDA_VARIABLE, *_DEVICES):
        words = [word.strip() for word in os.environ.get(name, "").split(",")]
        if all(word.isdecimal() for word in words) and len(words) >= count > 0:
            return [int(word) for word in words[:count]]
    return list(range(count))
