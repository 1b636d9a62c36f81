"""`--gpus` of a plan: the grammar of jobs, or models of GPUs without a number where any number will do."""

from __future__ import annotations

import re
from typing import Final

from phalanx.core.work.gpus import parse_gpus

_MODEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,40}")


def parse_gpus_or_models(text: str) -> None:
    """Check that the text has one of the two forms.

    Raises:
        BadRequest: it has neither.
    """
    if not gpu_models(text):
        parse_gpus(text)


def gpu_models(text: str) -> list[str]:
    """Return the models of `h100` or `h100,l40s`; empty for another form."""
    words = [word.strip() for word in text.split(",")]
    return words if all(_MODEL.fullmatch(word) for word in words) else []
