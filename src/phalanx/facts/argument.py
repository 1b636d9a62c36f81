"""The MODEL argument of `phalanx plan`: a name of the table, a config file, or sizes written out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.performance.model import Mixture, Model
from phalanx.core.work.nearest import nearest
from phalanx.facts.configs import CONFIG, config_at
from phalanx.facts.files import own_tables
from phalanx.facts.models import model_named, read_models
from phalanx.facts.sane import sane

SIZES: Final = ("layers", "hidden", "heads", "vocab", "kv_heads", "head_dim", "ffn", "gated", "tied", "positions", "biases",
                "experts", "per_token", "expert_ffn", "shared_ffn", "dense_layers")  # fmt: skip
NEEDED: Final = ("layers", "hidden", "heads", "vocab")
_TRUTHS: Final = ("gated", "tied", "biases")
_PAIR: Final = re.compile(r"\s*([A-Za-z_]+)\s*=\s*(-?[0-9]{1,15})\s*")
_TEXT_MAX: Final = 4096  # as long as a path may be


def model_from(text: str, *, home: str = "", notes: list[str] | None = None) -> Model:
    """The model that the argument means.

    Args:
        text: a name ("llama3-70b", "meta-llama/Llama-3.1-70B", "70b"), a path of a `config.json` or of its folder, or sizes
            ("layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256").
        home: the state folder, whose facts/models.csv goes before the shipped table; empty for none.
        notes: is told what was assumed.

    Raises:
        BadRequest: no such model, or sizes that cannot be.
        BadFile: a config that cannot be read or is of an unsupported kind.
    """
    said = [] if notes is None else notes
    if not text.strip() or len(text) > _TEXT_MAX:
        raise BadRequest("model: an empty name" if not text.strip() else "model: the name is longer than any path",
                         hint="write llama3-70b, a path of a config.json, or layers=..,hidden=..,heads=..,vocab=..")  # fmt: skip
    if "=" in text and not os.path.exists(text):
        return model_of_sizes(text, said)
    if os.path.isfile(text) or os.path.isfile(os.path.join(text, CONFIG)):
        return config_at(text)
    if text.endswith(".json"):
        raise BadFile(f"{text}: no such file")
    try:
        return model_named(text, models=read_models(*own_tables(home, "models.csv")) if home else None, notes=said)
    except BadRequest:
        if os.path.isdir(text):
            raise BadFile(f"{text}: the folder holds no {CONFIG}") from None
        raise


def model_of_sizes(text: str, notes: list[str]) -> Model:
    """The model of `layers=32,hidden=4096,...`. Key-value heads are all heads and the head size is hidden over heads unless stated; without
    `ffn` the MLP is four times as wide as the model and has no gate, with it it has one (SwiGLU).

    Raises:
        BadRequest: outside that grammar, a size missing or given twice, or sizes that cannot be.
    """
    given = _pairs(text)
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise BadRequest(
            f"model: {missing[0]} is missing", hint=f"needed: {', '.join(NEEDED)}; also: {', '.join(SIZES[4:])}"
        )
    for name, value in given.items():
        if value < (0 if name in (*_TRUTHS, "positions", "shared_ffn", "dense_layers") else 1):
            raise BadRequest(f"model: {name} is {value}; it must be a number above 0")
        if name in _TRUTHS and value > 1:
            raise BadRequest(f"model: {name} is {value}; it must be 1 or 0")
    hidden, heads = given["hidden"], given["heads"]
    if "head_dim" not in given and hidden % heads:
        raise BadRequest(
            f"model: {heads} heads do not divide the hidden size {hidden}",
            hint="give head_dim, or another number of heads",
        )
    if "ffn" not in given:
        notes.append(f"ffn not given: {4 * hidden}, four times the hidden size, without a gate")
    model = Model(
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
    return sane(model, "model")


def _pairs(text: str) -> dict[str, int]:
    given: dict[str, int] = {}
    for part in text.split(","):
        found = _PAIR.fullmatch(part)
        if found is None:
            raise BadRequest(
                f"model: {part.strip()[:60]!r} is no size", hint="write layers=32,hidden=4096,heads=32,vocab=32000"
            )
        name = found[1].lower()
        if name not in SIZES:
            close = nearest(name, SIZES)
            raise BadRequest(f"model: unknown size {name[:60]!r}",
                             hint=f"did you mean {close!r}?" if close else f"known: {', '.join(SIZES)}")  # fmt: skip
        if name in given:
            raise BadRequest(f"model: {name} is given twice")
        given[name] = int(found[2])
    return given


def _mixture(given: Mapping[str, int]) -> Mixture | None:
    """None for a dense model.

    Raises:
        BadRequest: experts without how many each token visits, or the reverse.
    """
    if "experts" not in given:
        lone = next((name for name in ("per_token", "expert_ffn", "shared_ffn", "dense_layers") if name in given), None)
        if lone is not None:
            raise BadRequest(f"model: {lone} says nothing without experts", hint="add experts=8")
        return None
    if "per_token" not in given:
        raise BadRequest("model: experts without per_token", hint="add per_token=2: how many of them each token visits")
    return Mixture(
        experts=given["experts"],
        per_token=given["per_token"],
        ffn=given.get("expert_ffn", given.get("ffn", 4 * given["hidden"])),
        shared_ffn=given.get("shared_ffn", 0),
        dense_layers=given.get("dense_layers", 0),
    )
