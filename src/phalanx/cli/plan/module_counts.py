"""Count a network of the user's: start `phalanx/torch/count_module.py` with the user's Python, and read what it prints."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.planner.counted.data_parallel import CountedNetwork

_TIMEOUT_S: Final = 300.0  # importing torch takes seconds, counting a large network a minute
_COUNTS, _FAILED = "PHALANX_COUNTS ", "PHALANX_FAILED "


def count_network(module: str, inputs: Sequence[str], *, precision: str, python: str | None) -> CountedNetwork:
    """Return the counts of one micro-batch of the network that `module` names.

    Args:
        module: `my_models:build`, importable from the working directory.
        inputs: `8x3x224x224`, `8x128:int64`, `timestep=8`; the first size is the batch.
        precision: of parameters and inputs.
        python: the interpreter; None for `python` of the PATH, else this one.

    Raises:
        BadRequest: there is no such Python, it has no torch, or the network could not be built or run; in one line.
    """
    if not inputs:
        raise BadRequest(
            "--module needs the shape of its input", hint="--input 8x3x224x224: the first size is the batch"
        )
    program = python or shutil.which("python") or sys.executable
    words = [program, str(_script()), module, precision, *inputs]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )  # the user's own Python
    except (OSError, ValueError) as error:
        raise BadRequest(f"--python {program}: {getattr(error, 'strerror', None) or error}") from None
    except subprocess.TimeoutExpired:
        raise BadRequest(f"--module {module}: not counted within {_TIMEOUT_S:.0f} s") from None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_COUNTS):
            counts = json.loads(line.removeprefix(_COUNTS))
            return CountedNetwork(**{one.name: counts[one.name] for one in fields(CountedNetwork)})
        if line.startswith(_FAILED):
            raise BadRequest(
                f"--module {module}: {line.removeprefix(_FAILED)}", hint="it is built and run on the meta device"
            )
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300]
    if "No module named 'torch'" in done.stderr:
        raise BadRequest(f"--module {module}: {program} has no torch", hint="--python PATH names one that has it")
    raise BadRequest(f"--module {module}: {last}")


def _script() -> Path:
    """Return the path of the script without importing its package, which imports torch."""
    found = importlib.util.find_spec("phalanx")
    assert found is not None  # this is it
    assert found.submodule_search_locations is not None  # it is a package
    return Path(next(iter(found.submodule_search_locations))) / "torch" / "count_module.py"
