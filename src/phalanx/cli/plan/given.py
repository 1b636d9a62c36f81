"""What stands after `--plan` or under `plan:`: words that the head reads, a file that `phalanx plan --save` wrote, or a wish to plan now."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.client.given import bytes_of
from phalanx.core.errors import BadFile, BadRequest, TooLarge
from phalanx.core.work.keys import BadKey
from phalanx.core.work.layout import layout_from_json
from phalanx.core.work.nearest import nearest
from phalanx.core.work.planned import layout_text

FILE_BYTES_MAX: Final = 4 << 20  # a saved answer has some hundred KiB; more is another file
WISH_KEYS: Final = ("model", "seq", "global_batch", "method", "precision", "stack", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWish:
    """A mapping under `plan:`: planned when the job is handed in, on the GPUs that it asks for. Values are as written."""

    model: str
    options: Mapping[str, str]
    folder: str  # from which a model's file is meant


def plan_given(value: object, folder: str) -> str | PlanWish:
    """The words for the head, or what is to be planned first. `folder`: from which a file is meant.

    Raises:
        BadKey: a file that cannot be read or holds no such layout, or a mapping without a model.
    """
    if isinstance(value, Mapping):
        return _wish(value, folder)
    text = str(value).strip()
    path, mark, number = text.partition("#")
    if not path.lower().endswith(".json"):
        return text
    if mark and not (number.isdigit() and int(number)):
        raise _bad(f"{text}: after # stands the number of a layout, from 1", f"{path}#1")
    return _from_file(os.path.join(folder, os.path.expanduser(path)), path, int(number or 1))


def _wish(value: Mapping[Any, Any], folder: str) -> PlanWish:
    for key in value:
        if key not in WISH_KEYS:
            near = nearest(str(key), WISH_KEYS)
            raise _bad(f"unknown key {key!r}", f"did you mean {near!r}?" if near else f"known: {' '.join(WISH_KEYS)}")
    options = {str(key): str(text) for key, text in value.items() if text is not None}
    model = options.pop("model", "")
    if not model:
        raise _bad("the mapping names no model", "write plan: {model: llama-3-8b, seq: 4096, global_batch: 512}")
    return PlanWish(model=model, options=options, folder=folder)


def _from_file(full: str, path: str, number: int) -> str:
    try:
        raw = bytes_of(full, FILE_BYTES_MAX, "saved plan")
    except (BadFile, TooLarge) as error:
        raise _bad(error.message.replace(full, path), "phalanx plan MODEL --save FILE.json writes one") from None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:  # brackets within brackets
        raise _bad(f"{path}: not JSON: {error}", "phalanx plan MODEL --save FILE.json writes one") from None
    layout = _chosen(found, path, number)
    try:
        return layout_text(layout_from_json(layout))
    except BadRequest as error:
        raise _bad(f"{path}: {error.message}", error.hint) from None


def _chosen(found: object, path: str, number: int) -> Mapping[str, Any]:
    """The n-th layout of a saved answer, or the only one of a file that is a layout itself."""
    if not isinstance(found, Mapping):
        raise _bad(f"{path}: holds no plan", "phalanx plan MODEL --save FILE.json writes one")
    layouts = found.get("layouts", [found])
    if not isinstance(layouts, list) or not layouts:
        why = str(found.get("reason", "") or "it holds no layout")
        raise _bad(f"{path}: {why[:200]}", "phalanx plan says what would fit")
    if number > len(layouts):
        raise _bad(f"{path}: has {len(layouts)} layouts, and number {number} is asked for", f"{path}#{len(layouts)}")
    one = layouts[number - 1]
    layout = one.get("layout", one) if isinstance(one, Mapping) else None
    if not isinstance(layout, Mapping):
        raise _bad(f"{path}: layout {number} is no layout", "phalanx plan MODEL --save FILE.json writes one")
    return layout


def _bad(message: str, hint: str) -> BadKey:
    return BadKey(f"plan: {message}", key="plan", hint=hint)
