"""Count what one training step of any `torch.nn.Module` needs: parameters, FLOPs, memory traffic, saved activations. Prints JSON.

    python count_module.py MODULE:NAME PRECISION INPUT [INPUT ...]

`phalanx plan --module` starts this file with the user's Python, which needs torch and not Phalanx. NAME is a module, its class, or a function
without arguments that builds it. INPUT is `[name=]8x3x224x224[:int64]`; the first size is the batch. Everything happens on the `meta` device: no
memory, no weights, no GPU. The loss is the sum of all outputs.
FLOPs are those of torch's FlopCounterMode (products, convolutions, attention), forward and backward. Traffic is the bytes that all other
kernels read and write, unfused. Saved are the distinct storages that autograd keeps for the backward pass, without parameters and inputs.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?([0-9]+(?:x[0-9]+)*)(?::(\w+))?")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TENSORS = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool, "float32": torch.float32}


class Failed(Exception):
    """One line for the user."""


class _KernelCounter(TorchDispatchMode):
    """Counts kernels, and the bytes of those that are no products."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes = 0
        self.convolution_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", func)
        if getattr(func, "is_view", False) or _is_empty(func):
            return found
        self.kernels += 1
        tensors = [one for one in tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor)]
        moved = sum(one.numel() * one.element_size() for one in tensors)
        if packet not in PRODUCTS:
            self.bytes += moved
        elif "conv" in str(packet):
            self.convolution_bytes += moved * (
                2 if "backward" in str(packet) else 1
            )  # gradients of input and of weight
        return found


def _is_empty(func: Any) -> bool:
    name = str(func)
    return any(word in name for word in ("empty", "detach", "alias", "_unsafe_view", "t.default"))


def _products() -> set[Any]:
    from torch.utils.flop_counter import flop_registry

    return set(flop_registry)


PRODUCTS = _products()


def main(words: list[str]) -> dict[str, Any]:
    """Return the counts for the command's words."""
    target, precision, *inputs = words
    module = _build(target).to(DTYPES[precision])
    module.train()
    positional, named, batch = _inputs(inputs, DTYPES[precision])
    own = {_storage(one) for one in [*module.parameters(), *module.buffers(), *positional, *named.values()]}
    saved: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = _storage(tensor)
        if place not in own:
            saved[place] = tensor  # kept, so that its storage is not used again
        return tensor

    flops, kernels = FlopCounterMode(display=False), _KernelCounter()
    with flops, kernels:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = module(*positional, **named)
        forward = flops.get_total_flops()
        floats = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
        if not floats and hasattr(outputs, "__dict__"):
            floats = [one for one in vars(outputs).values() if isinstance(one, torch.Tensor) and one.requires_grad]
        if not floats:
            raise Failed("the output has no tensor with a gradient; return a tensor, or a tuple or dict of tensors")
        torch.autograd.backward([one.float().sum() for one in floats])
    by_kind = flops.get_flop_counts().get("Global", {})
    convolutions = sum(count for kind, count in by_kind.items() if "conv" in str(kind))
    parameters = list(module.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    return {
        "name": type(module).__name__,
        "batch": batch,
        "parameters": sum(one.numel() for one in parameters),
        "trained": trained,
        "largest_block": _largest_block(module),
        "forward_flops": forward,
        "flops": flops.get_total_flops(),
        "convolution_flops": convolutions,
        "convolution_bytes": kernels.convolution_bytes,
        "traffic_bytes": kernels.bytes,
        "kernels": kernels.kernels,
        "saved_bytes": sum(one.untyped_storage().nbytes() for one in saved.values()),
        "output_bytes": sum(one.numel() * one.element_size() for one in floats),
        "torch": torch.__version__,
    }


def _build(target: str) -> torch.nn.Module:
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise Failed(f"{target!r} is not MODULE:NAME")
    sys.path.insert(0, os.getcwd())
    with torch.device("meta"):
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            if not hasattr(found, part):
                raise Failed(f"{module_name} has no {name}")
            found = getattr(found, part)
        found = found if isinstance(found, torch.nn.Module) else found()
    if not isinstance(found, torch.nn.Module):
        raise Failed(f"{target} gave a {type(found).__name__}, not a torch.nn.Module")
    return found.to("meta")


def _inputs(words: list[str], dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int]:
    positional: list[torch.Tensor] = []
    named: dict[str, torch.Tensor] = {}
    batch = 0
    for word in words:
        match = INPUT.fullmatch(word)
        if match is None:
            raise Failed(f"input {word!r} is not [name=]8x3x224x224[:int64]")
        name, sizes, kind = match.groups()
        if kind is not None and kind not in TENSORS:
            raise Failed(f"input {word!r}: {kind} is not one of {', '.join(TENSORS)}")
        shape = [int(size) for size in sizes.split("x")]
        tensor = torch.empty(shape, dtype=dtype if kind is None else TENSORS[kind], device="meta")
        batch = batch or shape[0]
        if name is None:
            positional.append(tensor)
        else:
            named[name] = tensor
    return positional, named, batch


def _largest_block(module: torch.nn.Module) -> int:
    """Return the parameters of the largest child of any list of blocks, which FSDP gathers at once; all without such lists."""
    lists = [one for one in module.modules() if isinstance(one, (torch.nn.ModuleList, torch.nn.Sequential))]
    sizes = [sum(part.numel() for part in child.parameters()) for one in lists for child in one.children()]
    whole = sum(one.numel() for one in module.parameters())
    return max([size for size in sizes if size < whole], default=whole)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # the only identity of a storage on `meta`


if __name__ == "__main__":
    try:
        print("PHALANX_COUNTS " + json.dumps(main(sys.argv[1:])), flush=True)
    except Failed as error:
        print(f"PHALANX_FAILED {error}", flush=True)
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  # whatever the user's code raises is one line of an answer
        text = " ".join(str(error).split())[:300]
        print(f"PHALANX_FAILED {type(error).__name__}: {text}", flush=True)
        sys.exit(1)
