"""Read the state for a checkpoint from live objects, and restore it.

Model and optimizer use torch.distributed.checkpoint.state_dict, which gives parameters the same names for plain modules, DDP and
FSDP2, so that DCP can load them into another world size. The state of one rank (random generators, the `extra` of the user, schedulers
and data loaders) is one small file per rank, `rank-<k>.pt`. It is loaded with weights_only=True, so it cannot run code.
"""

from __future__ import annotations

import copy
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
        """Return its state as plain Python values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state from `state_dict`."""
        ...


class SplitModel(Protocol):
    """A model with its optimizer under a layout, as returned by `phalanx.torch.parallelize`."""

    layout: Any

    def live_state(self) -> dict[str, Any]:
        """Return the sharded state by name, as the function below."""
        ...

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state, as the function below."""
        ...


def rank_file(rank: int) -> str:
    """Return the name of the file of one rank in a checkpoint."""
    return f"rank-{rank}.pt"


def live_state(model: Any, optimizers: tuple[Any, ...]) -> dict[str, Any]:
    """Return the sharded state of model and optimizers by name; it shares memory with them. Collective."""
    if hasattr(model, "live_state"):
        split: SplitModel = model
        return split.live_state()
    if not optimizers:
        return {"model": get_model_state_dict(model)}
    model_state, optimizer_state = get_state_dict(model, optimizers)
    return {"model": model_state, "optimizer": optimizer_state}


def layout_of(model: Any) -> str:
    """Return the layout of a model, empty without one. The state of rank k is valid under the same layout only."""
    return str(model.layout) if hasattr(model, "live_state") else ""


def restore_state(model: Any, optimizers: tuple[Any, ...], state: Mapping[str, Any]) -> None:
    """Restore model and optimizers from `state`, which was loaded into the result of `live_state`."""
    if hasattr(model, "restore_state"):
        split: SplitModel = model
        split.restore_state(state)
        return
    if not optimizers:
        set_model_state_dict(model, state["model"])
        return
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def collect_rank_state(
    stateful: Mapping[str, Stateful],
    extra: Mapping[str, Any],
    device: Any,
    *,
    costs: tuple[float | None, float | None],
    layout: str,
) -> dict[str, Any]:
    """Return a copy of the state of this rank for a checkpoint. `costs`: measured stall and write of a checkpoint, in seconds.

    A copy, because training changes the lists and tensors in `extra` and in the objects while a thread writes them.

    Raises:
        TypeError: `extra` or the state of an object contains a value that cannot be loaded without running code.
    """
    objects = {name: one.state_dict() for name, one in stateful.items()}
    return {
        "extra": _plain_copy(dict(extra), "extra"),
        "objects": _plain_copy(objects, "the state of "),
        "generators": _generators(device),
        "costs": costs,
        "layout": layout,
    }


def written_layout(path: str) -> str:
    """Return the layout under which a rank file was written; empty without one."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return str(saved.get("layout", ""))


def restore_rank_state(
    path: str, stateful: Mapping[str, Stateful], device: Any, *, generators: bool
) -> tuple[Extra, tuple[float | None, float | None]]:
    """Load a rank file: restore objects, and random generators if `generators`. Return the `extra` of the user and the costs.

    Raises:
        KeyError: the checkpoint does not contain an object.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, one in stateful.items():
        if name not in saved["objects"]:
            raise KeyError(f"{path} has no state of {name!r}; it has {sorted(saved['objects'])}")
        one.load_state_dict(saved["objects"][name])
    if generators:
        _restore_generators(saved["generators"], device)
    return saved["extra"], saved["costs"]


def write_durably(value: Any, path: str) -> None:
    """Write `value` to `path` with torch.save. The caller fsyncs the file when it seals it."""
    with open(path, "wb") as file:
        torch.save(value, file)


def files_of_rank(folder: str, rank: int) -> Iterable[str]:
    """Yield the names of the files in `folder` that this rank wrote. DCP prefixes shards with the rank; rank 0 writes the index."""
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


def _plain_copy(value: Any, where: str) -> Any:
    """Return a deep copy; reject values that weights_only=True would reject when loading."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, _ATOMS):
        return value
    if type(value) in _MAPPINGS:
        copied = copy.copy(value)  # keeps order and the default of a defaultdict
        for key, item in value.items():
            _plain_copy(key, f"{where}, the key {key!r}")
            copied[key] = _plain_copy(item, f"{where}[{key!r}]")
        return copied
    if type(value) in {list, tuple, set}:
        return type(value)(_plain_copy(item, f"{where}[{index}]") for index, item in enumerate(value))
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint supports numbers, strings, bytes, tensors, "
        "and lists, tuples, sets and dicts of them"
    )
