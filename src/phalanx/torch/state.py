"""What a checkpoint holds, taken from and put back into live objects.

Model and optimizer go through torch.distributed.checkpoint.state_dict, which names parameters alike for plain modules, DDP and
FSDP2, so that DCP can load them into another world size. What belongs to one rank (random number generators, the user's `extra`, the
state of schedulers and loaders) is one small file per rank, `rank-<k>.pt`, readable with weights_only=True: it can run no code.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

Extra = dict[str, Any]
_ATOMS: Final = (type(None), bool, int, float, str, bytes, torch.Tensor)
_MAPPINGS: Final = {dict, OrderedDict, Counter, defaultdict}


class Stateful(Protocol):
    """An object that can be saved and restored: a learning-rate scheduler, a data loader, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, of plain Python values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what `state_dict` returned."""
        ...


class Split(Protocol):
    """A model that knows its own state under a layout, optimizer included: what `phalanx.torch.parallelize` returns."""

    layout: Any

    def live_state(self) -> dict[str, Any]:
        """As the function below."""
        ...

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """As the function below."""
        ...


def rank_file(rank: int) -> str:
    """Name of one rank's own file within a checkpoint."""
    return f"rank-{rank}.pt"


def live_state(model: Any, optimizers: tuple[Any, ...]) -> dict[str, Any]:
    """The sharded state of model and optimizers by name; it shares memory with them. Called by all ranks."""
    if hasattr(model, "live_state"):
        split: Split = model
        return split.live_state()
    if not optimizers:
        return {"model": get_model_state_dict(model)}
    model_state, optimizer_state = get_state_dict(model, optimizers)
    return {"model": model_state, "optimizer": optimizer_state}


def layout_of(model: Any) -> str:
    """The layout a model is split by, empty for none. What belongs to rank k under one belongs to nobody under another."""
    return str(model.layout) if hasattr(model, "live_state") else ""


def restore_state(model: Any, optimizers: tuple[Any, ...], state: Mapping[str, Any]) -> None:
    """Put `state`, loaded into what `live_state` gave, back into model and optimizers."""
    if hasattr(model, "restore_state"):
        split: Split = model
        split.restore_state(state)
        return
    if not optimizers:
        set_model_state_dict(model, state["model"])
        return
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def rank_state(
    stateful: Mapping[str, Stateful],
    extra: Mapping[str, Any],
    device: Any,
    *,
    costs: tuple[float | None, float | None],
    layout: str,
) -> dict[str, Any]:
    """This rank's own part of a checkpoint. `costs` are stall and write of the checkpoints so far, in seconds; `layout` as it is written.

    Raises:
        TypeError: `extra` or an object's state holds a value that could not be loaded again without running code.
    """
    objects = {name: thing.state_dict() for name, thing in stateful.items()}
    _require_plain(objects, "the state of ")
    _require_plain(extra, "extra")
    return {
        "extra": dict(extra),
        "objects": objects,
        "generators": _generators(device),
        "costs": costs,
        "layout": layout,
    }


def written_layout(path: str) -> str:
    """The layout under which a rank file was written; empty for a model that no layout split."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return str(saved.get("layout", ""))


def restore_rank_state(
    path: str, stateful: Mapping[str, Stateful], device: Any, *, generators: bool
) -> tuple[Extra, tuple[float | None, float | None]]:
    """Load a rank file: objects get their state, generators too if `generators`. Returns the user's extra and the costs.

    Raises:
        KeyError: an object was not in the checkpoint.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, thing in stateful.items():
        if name not in saved["objects"]:
            raise KeyError(f"{path} holds no state of {name!r}; it has {sorted(saved['objects'])}")
        thing.load_state_dict(saved["objects"][name])
    if generators:
        _restore_generators(saved["generators"], device)
    return saved["extra"], saved["costs"]


def write_durably(value: Any, path: str) -> None:
    """torch.save to `path`; the caller fsyncs when it seals the file."""
    with open(path, "wb") as file:
        torch.save(value, file)


def own_files(folder: str, rank: int) -> Iterable[str]:
    """Names of the files in `folder` that this rank wrote: DCP prefixes its shards with the rank; rank 0 writes the index."""
    prefix = f"__{rank}_"
    for name in sorted(os.listdir(folder)):
        if name.startswith(prefix) or name == rank_file(rank) or (rank == 0 and name == ".metadata"):
            yield name


def _generators(device: Any) -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return states


def _restore_generators(states: Mapping[str, Any], device: Any) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, cached))


def _require_plain(value: Any, where: str) -> None:
    """Refuse what weights_only=True would refuse when it is too late."""
    if isinstance(value, _ATOMS):
        return
    if type(value) in _MAPPINGS:
        for key, item in value.items():
            _require_plain(key, f"{where}, the key {key!r}")
            _require_plain(item, f"{where}[{key!r}]")
        return
    if type(value) in {list, tuple, set}:
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
        return
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint takes numbers, strings, bytes, tensors "
        "and lists, tuples, sets and dicts of them"
    )
