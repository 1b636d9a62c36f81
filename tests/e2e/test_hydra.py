"""A Hydra sweep with `hydra/launcher=phalanx` on a real head, where hydra-submitit-launcher is installed."""

import os
import subprocess
import sys

import pytest

from benchmarks.cluster import cluster

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs: pip install '.[hydra]'")
pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]

PROGRAM = """
import os
import hydra

@hydra.main(version_base=None, config_path=None)
def main(given):
    with open(f"{os.environ['FOUND']}/{given.x}", "w") as file:
        file.write(os.environ["PHALANX_JOB_ID"])
    if given.x == 3:
        raise ValueError("three")

if __name__ == "__main__":
    main()
"""


def test_a_sweep_is_one_array_and_a_failure_is_told(tmp_path):
    (tmp_path / "sweep.py").write_text(PROGRAM)

    def sweep(values):
        return subprocess.run(
            [sys.executable, "sweep.py", "-m", "hydra/launcher=phalanx", f"+x={values}", *LAUNCHER],
            cwd=tmp_path,
            env={**os.environ, "PHALANX_HOME": head.home, "FOUND": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    with cluster("1x2") as head:
        done = sweep("1,2")
        assert (done.returncode, "Error importing" in done.stderr) == (0, False), done.stderr
        ids = {name: (tmp_path / name).read_text() for name in ("1", "2")}
        assert ids == {"1": "1_0", "2": "1_1"}
        job = head.job("1_0")
        assert (job["name"], job["priority"], job["labels"]) == ("sweep", 3, {"a": "b"})
        done = sweep("3")
        assert done.returncode != 0
        assert "ValueError: three" in done.stderr


LAUNCHER = ("hydra.launcher.gpus_per_node=1", "hydra.launcher.priority=3", "+hydra.launcher.labels={a: b}")
