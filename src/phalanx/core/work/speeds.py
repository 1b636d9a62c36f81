"""The job key `speeds`: how fast the job runs on GPU models, relative to each other, as its user measured it.

    speeds: {h100: 2.1, a100: 1}

Only ratios count. Models are named as in `gpus`. `planned_speeds` is the same by the planner: the command line sets it when it plans the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from phalanx.core.work.gpus import GPU_KINDS_MAX
from phalanx.core.work.job_file.keys import InvalidKey

_MODEL: Final = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_RATIO_MAX: Final = 1e6  # between two models: past any hardware; bounds a typo
_HINT: Final = "write speeds: {h100: 2.1, a100: 1}"
Speeds = tuple[tuple[str, float], ...]


def parse_speeds(pairs: Iterable[tuple[str, str]], *, key: str = "speeds") -> Speeds:
    """The speed on each model, in the order written.

    Raises:
        InvalidKey: not a model, not a number above 0, a model named twice, or too many models.
    """
    found: dict[str, float] = {}
    for name, text in pairs:
        model = name.strip().lower()
        if not _MODEL.fullmatch(model) or model in found:
            twice = "is given twice" if model in found else "is not a GPU model"
            raise InvalidKey(f"{key}: {name[:64]!r} {twice}", key=key, hint=_HINT)
        try:
            speed = float(text)
        except ValueError:
            speed = 0.0
        if not 1.0 / _RATIO_MAX <= speed <= _RATIO_MAX:  # also refuses NaN
            raise InvalidKey(
                f"{key}: {model}: {text[:40]!r} is not a speed between 0.000001 and 1,000,000",
                key=key,
                hint=_HINT,
            )
        found[model] = speed
    if len(found) > GPU_KINDS_MAX:
        raise InvalidKey(f"{key}: {len(found)} models are more than {GPU_KINDS_MAX}", key=key, hint=_HINT)
    return tuple(found.items())
