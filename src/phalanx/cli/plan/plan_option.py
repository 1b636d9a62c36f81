"""Read the value of `--plan` or `plan:`: layout text for the head, a file of `phalanx plan --save`, or a request to plan now."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile, BadRequest, TooLarge
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.core.work.layouts.layout import layout_from_json
from phalanx.core.work.nearest_match import suggestion
from phalanx.plans.option_words import TRAINING_DEFAULTS

FILE_BYTES_MAX: Final = 4 << 20  # a saved plan has a few hundred KiB
_SAVE_HINT: Final = "create one with phalanx plan MODEL --save FILE.json"
PLAN_KEYS: Final = ("model", *TRAINING_DEFAULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A mapping under `plan:`, to be planned at submit on the job's GPUs. Values are unparsed."""

    model: str
    options: Mapping[str, str]
    folder: str  # base folder of a model file


def parse_plan_option(value: object, folder: str) -> str | PlanRequest:
    """Return the layout text for the head, or a request to plan first. `folder` is the base of relative paths.

    Raises:
        InvalidKey: the file cannot be read or lacks the layout, or the mapping has no model.
    """
    if isinstance(value, Mapping):
        return _request(value, folder)
    text = str(value).strip()
    path, mark, number = text.partition("#")
    if not path.lower().endswith(".json"):
        return text
    if mark and not (number.isdigit() and int(number)):
        raise _bad(f"{text}: the part after # must be a layout number from 1", f"{path}#1")
    return _from_file(os.path.join(folder, os.path.expanduser(path)), path, int(number or 1))


def _request(value: Mapping[Any, Any], folder: str) -> PlanRequest:
    for key in value:
        if key not in PLAN_KEYS:
            hint = suggestion(str(key), PLAN_KEYS, f"known: {' '.join(PLAN_KEYS)}", form="{!r}")
            raise _bad(f"unknown key {key!r}", hint)
    options = {str(key): str(text) for key, text in value.items() if text is not None}
    model = options.pop("model", "")
    if not model:
        raise _bad("the mapping has no model", "example: plan: {model: llama-3-8b, seq: 4096, global_batch: 512}")
    return PlanRequest(model=model, options=options, folder=folder)


def _from_file(full: str, path: str, number: int) -> str:
    try:
        raw = read_file_bytes(full, FILE_BYTES_MAX, "saved plan")
    except (BadFile, TooLarge) as error:
        raise _bad(error.message.replace(full, path), _SAVE_HINT) from None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise _bad(f"{path}: not JSON: {error}", _SAVE_HINT) from None
    layout = _chosen(found, path, number)
    try:
        return layout_text(layout_from_json(layout))
    except BadRequest as error:
        raise _bad(f"{path}: {error.message}", error.hint) from None


def _chosen(found: object, path: str, number: int) -> Mapping[str, Any]:
    """Return the n-th layout of a saved plan, or the layout of a file that contains only one."""
    if not isinstance(found, Mapping):
        raise _bad(f"{path}: contains no plan", _SAVE_HINT)
    layouts = found.get("layouts", [found])
    if not isinstance(layouts, list) or not layouts:
        why = str(found.get("reason", "") or "contains no layout")
        raise _bad(f"{path}: {why[:200]}", "phalanx plan shows what fits")
    if number > len(layouts):
        raise _bad(f"{path}: layout {number} does not exist; the file has {len(layouts)}", f"{path}#{len(layouts)}")
    one = layouts[number - 1]
    layout = one.get("layout", one) if isinstance(one, Mapping) else None
    if not isinstance(layout, Mapping):
        raise _bad(f"{path}: layout {number} is invalid", _SAVE_HINT)
    return layout


def _bad(message: str, hint: str) -> InvalidKey:
    return InvalidKey(f"plan: {message}", key="plan", hint=hint)
