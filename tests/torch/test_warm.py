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
