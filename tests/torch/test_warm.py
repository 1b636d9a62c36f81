"""A warm process may import phalanx.torch and fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch]


def test_importing_everything_starts_no_thread():
    """NumPy's OpenBLAS starts its own threads at import unless told not to, so a warm process sets OPENBLAS_NUM_THREADS=1."""
    script = (
        "import torch, phalanx.torch, phalanx.torch.checkpointer, os\n"
        "assert not torch.distributed.is_initialized()\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr


def test_importing_phalanx_torch_alone_leaves_the_checkpoint_machinery_out():
    script = "import phalanx.torch, sys; print('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"


FAULTS = """
import gc, os, sys, torch
from phalanx.node.processes import zygote_main
shared = [name for name in sys.modules if name not in {"__main__", "sys", "builtins"}]
gc.disable(); gc.freeze()
def faults(keep):
    pid = os.fork()
    if pid == 0:
        gc.enable()
        zygote_main._shared[:] = shared if keep else []
        zygote_main._keep_what_is_shared() if keep else None
        sys.exit(3)
    _, status, usage = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    return usage.ru_minflt
print(faults(True), faults(False))
os._exit(0)
"""


def test_a_warm_rank_ends_without_copying_what_it_shares():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    kept, taken_apart = map(int, done.stdout.split())
    assert kept < 0.6 * taken_apart, (kept, taken_apart)  # 12,100 and 30,800 pages were seen
