"""Validate the sizes of a model, whether from a table, a config file or the command line."""

from __future__ import annotations

from typing import Final

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.planner.cost.model_shape import ModelShape

LAYERS_MAX: Final = 10_000  # forty times the deepest trained model; catches typing errors
WIDTH_MAX: Final = 10_000_000  # features, vocabulary, positions; forty times the largest known


def validate_model(model: ModelShape, where: str, error_class: type[PhalanxError] = BadRequest) -> ModelShape:
    """Return the model if it is valid.

    Raises:
        PhalanxError: of the class `error_class`: a size is out of range, or sizes contradict each other. The message has `where` and the size.
    """
    _in_range("layers", model.layers, LAYERS_MAX, where, error_class)
    for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        _in_range(name, getattr(model, name), WIDTH_MAX, where, error_class)
    _in_range("positions", model.positions, WIDTH_MAX, where, error_class, least=0)
    if model.heads % model.kv_heads:
        raise error_class(
            f"{where}: heads {model.heads} do not divide by kv_heads {model.kv_heads}",
            hint="each key-value head must serve the same number of heads",
        )
    if model.mixture is not None:
        _validate_mixture(model, where, error_class)
    if model.latent is not None:
        for name, least in (("query_rank", 0), ("kv_rank", 1), ("rope_dim", 0), ("value_dim", 1)):
            _in_range(name, getattr(model.latent, name), WIDTH_MAX, where, error_class, least=least)
    if model.window is not None:
        _in_range("window", model.window.tokens, WIDTH_MAX, where, error_class)
        _in_range("window_layers", model.window.layers, model.layers, where, error_class)
    return model


def _validate_mixture(model: ModelShape, where: str, wrong: type[PhalanxError]) -> None:
    mixture = model.mixture
    assert mixture is not None  # checked by the caller
    for name, least in (("experts", 1), ("per_token", 1), ("ffn", 1), ("shared_ffn", 0), ("dense_layers", 0)):
        shown = "expert_ffn" if name == "ffn" else name
        _in_range(shown, getattr(mixture, name), WIDTH_MAX, where, wrong, least=least)
    if mixture.per_token > mixture.experts:
        raise wrong(f"{where}: a token visits {mixture.per_token} experts, but a layer has only {mixture.experts}")
    if mixture.group_limit > mixture.groups or mixture.experts % mixture.groups:
        raise wrong(
            f"{where}: {mixture.group_limit} of {mixture.groups} groups, which must divide the {mixture.experts} experts, cannot be visited"
        )
    if mixture.dense_layers > model.layers:
        raise wrong(f"{where}: {mixture.dense_layers} dense layers exceed the {model.layers} layers")


def _in_range(name: str, value: int, most: int, where: str, wrong: type[PhalanxError], *, least: int = 1) -> None:
    if not least <= value <= most:
        raise wrong(f"{where}: {name} is {value}; it must be {least} to {most}")
