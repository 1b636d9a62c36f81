"""Whether a model's sizes can be at all: the one check for tables, config files and sizes written by hand."""

from __future__ import annotations

from typing import Final

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.performance.model import Model

LAYERS_MAX: Final = 10_000  # forty times the deepest model trained; bounds a typo
WIDTH_MAX: Final = 10_000_000  # features, tokens of a vocabulary, positions; forty times the largest known


def sane(model: Model, where: str, wrong: type[PhalanxError] = BadRequest) -> Model:
    """The model itself.

    Raises:
        PhalanxError: of the class `wrong`: a size cannot be, or sizes contradict each other; `where` and the size are named.
    """
    _in_range("layers", model.layers, LAYERS_MAX, where, wrong)
    for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        _in_range(name, getattr(model, name), WIDTH_MAX, where, wrong)
    _in_range("positions", model.positions, WIDTH_MAX, where, wrong, least=0)
    if model.heads % model.kv_heads:
        raise wrong(f"{where}: heads {model.heads} do not divide by kv_heads {model.kv_heads}",
                         hint="every key-value head serves equally many heads")  # fmt: skip
    if model.mixture is not None:
        _sane_mixture(model, where, wrong)
    if model.latent is not None:
        for name, least in (("query_rank", 0), ("kv_rank", 1), ("rope_dim", 0), ("value_dim", 1)):
            _in_range(name, getattr(model.latent, name), WIDTH_MAX, where, wrong, least=least)
    return model


def _sane_mixture(model: Model, where: str, wrong: type[PhalanxError]) -> None:
    mixture = model.mixture
    assert mixture is not None  # the caller's condition
    for name, least in (("experts", 1), ("per_token", 1), ("ffn", 1), ("shared_ffn", 0), ("dense_layers", 0)):
        shown = "expert_ffn" if name == "ffn" else name
        _in_range(shown, getattr(mixture, name), WIDTH_MAX, where, wrong, least=least)
    if mixture.per_token > mixture.experts:
        raise wrong(f"{where}: a token visits {mixture.per_token} experts, and a layer has {mixture.experts}")
    if mixture.dense_layers > model.layers:
        raise wrong(f"{where}: {mixture.dense_layers} dense layers are more than the {model.layers} layers")


def _in_range(name: str, value: int, most: int, where: str, wrong: type[PhalanxError], *, least: int = 1) -> None:
    if not least <= value <= most:
        raise wrong(f"{where}: {name} is {value}; it must be {least} to {most}")
