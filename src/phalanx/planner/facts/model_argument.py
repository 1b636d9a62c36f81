"""Parse the MODEL argument of `phalanx plan`: a name in the table, a config file, or a list of sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.model_shape import MixtureOfExperts, ModelShape
from phalanx.planner.facts.model_configs import CONFIG_FILE, read_config
from phalanx.planner.facts.models import ModelEntry, find_model, read_models
from phalanx.planner.facts.table_files import user_tables
from phalanx.planner.facts.validation import validate_model

REQUIRED_SIZES: Final = ("layers", "hidden", "heads", "vocab")
_FLAGS: Final = ("gated", "tied", "biases")
_MIXTURE: Final = ("per_token", "expert_ffn", "shared_ffn", "dense_layers", "groups", "group_limit")
ALL_SIZES: Final = (*REQUIRED_SIZES, "kv_heads", "head_dim", "ffn", *_FLAGS, "positions", "experts", *_MIXTURE)
_PAIR: Final = re.compile(r"\s*([A-Za-z_]+)\s*=\s*(-?[0-9]{1,15})\s*")
_TEXT_MAX: Final = 4096  # the longest path on Linux


def parse_model_argument(
    text: str, *, home: str = "", notes: list[str] | None = None, files: bool = True
) -> ModelShape:
    """Return the model that the argument names.

    Args:
        text: a name ("llama3-70b", "meta-llama/Llama-3.1-70B", "70b"), a path of a `config.json` or of its folder, or sizes
            ("layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256").
        home: the state folder, whose facts/models.csv overrides the shipped table; empty for none.
        notes: receives the assumptions.
        files: whether a path is looked up. Without, a text is a name or sizes, and no file is touched.

    Raises:
        BadRequest: unknown model, or invalid sizes.
        BadFile: the config cannot be read, or its kind is not supported.
    """
    notes = [] if notes is None else notes
    if not text.strip() or len(text) > _TEXT_MAX:
        raise BadRequest(
            f"model: the name is longer than {_TEXT_MAX} characters" if text.strip() else "model: the name is empty",
            hint="write llama3-70b, the path of a config.json, or layers=..,hidden=..,heads=..,vocab=..",
        )
    if not files:
        return model_from_sizes(text, notes) if "=" in text else find_model(text, models=_models(home), notes=notes)
    if "=" in text and not os.path.exists(text):
        return model_from_sizes(text, notes)
    if os.path.isfile(text) or os.path.isfile(os.path.join(text, CONFIG_FILE)):
        return read_config(text)
    if text.endswith(".json"):
        raise BadFile(f"{text}: no such file")
    try:
        return find_model(text, models=_models(home), notes=notes)
    except BadRequest:
        if os.path.isdir(text):
            raise BadFile(f"{text}: the folder has no {CONFIG_FILE}") from None
        raise


def _models(home: str) -> tuple[ModelEntry, ...] | None:
    return read_models(*user_tables(home, "models.csv")) if home else None


def model_from_sizes(text: str, notes: list[str]) -> ModelShape:
    """Return the model of `layers=32,hidden=4096,...`.

    Defaults: as many key-value heads as heads, and a head size of hidden over heads. Without `ffn` the MLP is four times as wide as the
    model and has no gate; with `ffn` it has one (SwiGLU).

    Raises:
        BadRequest: a syntax error, a size is missing or given twice, or the sizes are invalid.
    """
    given = _pairs(text)
    missing = [name for name in REQUIRED_SIZES if name not in given]
    if missing:
        raise BadRequest(
            f"model: {missing[0]} is missing",
            hint=f"required: {', '.join(REQUIRED_SIZES)}; optional: {', '.join(ALL_SIZES[len(REQUIRED_SIZES) :])}",
        )
    for name, value in given.items():
        if value < (0 if name in (*_FLAGS, "positions", "shared_ffn", "dense_layers") else 1):
            raise BadRequest(f"model: {name} is {value}; it must be a number above 0")
        if name in _FLAGS and value > 1:
            raise BadRequest(f"model: {name} is {value}; it must be 1 or 0")
    hidden, heads = given["hidden"], given["heads"]
    if "head_dim" not in given and hidden % heads:
        raise BadRequest(
            f"model: {heads} heads do not divide the hidden size {hidden}",
            hint="add head_dim, or change the number of heads",
        )
    if "ffn" not in given:
        notes.append(f"assumed ffn={4 * hidden}, four times the hidden size, without a gate")
    model = ModelShape(
        name="custom",
        layers=given["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=given.get("kv_heads", heads),
        head_dim=given.get("head_dim", hidden // heads),
        ffn=given.get("ffn", 4 * hidden),
        vocab=given["vocab"],
        gated=bool(given.get("gated", "ffn" in given)),
        tied=bool(given.get("tied", 0)),
        positions=given.get("positions", 0),
        biases=bool(given.get("biases", 0)),
        mixture=_mixture(given),
    )
    return validate_model(model, "model")


def _pairs(text: str) -> dict[str, int]:
    given: dict[str, int] = {}
    for part in text.split(","):
        found = _PAIR.fullmatch(part)
        if found is None:
            raise BadRequest(
                f"model: {part.strip()[:60]!r} is not a size", hint="write layers=32,hidden=4096,heads=32,vocab=32000"
            )
        name = found[1].lower()
        if name not in ALL_SIZES:
            hint = suggestion(name, ALL_SIZES, f"known: {', '.join(ALL_SIZES)}", form="{!r}")
            raise BadRequest(f"model: unknown size {name[:60]!r}", hint=hint)
        if name in given:
            raise BadRequest(f"model: {name} is given twice")
        given[name] = int(found[2])
    return given


def _mixture(given: Mapping[str, int]) -> MixtureOfExperts | None:
    """Return the mixture of the sizes; None for a dense model.

    Raises:
        BadRequest: `experts` without `per_token`, or a size of a mixture without `experts`.
    """
    if "experts" not in given:
        lone = next((name for name in _MIXTURE if name in given), None)
        if lone is not None:
            raise BadRequest(f"model: {lone} needs experts", hint="add experts=8")
        return None
    if "per_token" not in given:
        raise BadRequest("model: experts needs per_token", hint="add per_token=2: the experts that each token visits")
    return MixtureOfExperts(
        experts=given["experts"],
        per_token=given["per_token"],
        ffn=given.get("expert_ffn", given.get("ffn", 4 * given["hidden"])),
        shared_ffn=given.get("shared_ffn", 0),
        dense_layers=given.get("dense_layers", 0),
        groups=given.get("groups", 1),
        group_limit=given.get("group_limit", given.get("groups", 1)),
    )
