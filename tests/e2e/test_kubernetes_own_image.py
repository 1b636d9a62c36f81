"""Pods of an image that knows nothing of Phalanx, on a real API server: an init container brings the supervisor."""

import os
import sys

import pytest

from tests.contract.kubernetes_real_rig import TEMPLATE, real_kubernetes
from tests.kubernetes.real_cluster import TOOLS, why_not

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
WORDS = ("--kubernetes-image", "theirs", "--kubernetes-supervisor-image", "ours")
OURS = {"name": "phalanx-supervisor", "env": TEMPLATE["spec"]["containers"][0]["env"]}  # type: ignore[index]


def template(path):
    """The supervisor's image is this checkout; the other one has only this PATH."""
    theirs = {"name": "phalanx", "env": [{"name": "PATH", "value": path}]}
    return {"spec": {"securityContext": None, "initContainers": [OURS], "containers": [theirs]}}


def log_of(rig, job):
    return "".join(chunk["text"] for chunk in rig.call("GET", f"/v1/jobs/{job}/logs?cursor=")["chunks"])


def test_a_gang_runs_in_an_image_that_has_only_python():
    python = os.path.dirname(os.path.realpath(sys.executable))
    with real_kubernetes(WORDS, pod=template(f"{python}:/usr/bin:/bin")) as rig:
        script = "python3 -c 'import phalanx' 2>&1 | tail -1; echo path=$PYTHONPATH"
        job = rig.submit(run=script, gpus="2x1", tasks_per_node=1, name="theirs")
        view = rig.wait_for_state(job, "succeeded", "failed")
        text = log_of(rig, job)
        assert view["state"] == "succeeded", (rig.history(job), text)
        assert text.count("No module named 'phalanx'") == 2, text
        assert text.count("path=\n") == 2, "ranks have the variables of their image"


def test_an_image_with_another_python_fails_the_job_with_one_line():
    folder = os.path.join(TOOLS, f"other-python-{os.getpid()}")
    os.makedirs(folder)
    program = os.path.join(folder, "python3")
    lie = "import sys, runpy; sys.version_info = (3, 12, 0); runpy.run_path(sys.argv[1], run_name='__main__')"
    try:
        with open(program, "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -c "{lie}" "$@"\n')
        os.chmod(program, 0o755)
        with real_kubernetes(WORDS, pod=template(f"{folder}:/usr/bin:/bin")) as rig:
            job = rig.submit(run="true", gpus="1", name="newer")
            view = rig.wait_for_state(job, "failed", "succeeded")
            line = "the image theirs cannot run the supervisor: phalanx: this image has Python 3.12 as python3, and the supervisor needs 3.11"
            assert (view["state"], view["attempts"]) == ("failed", 1)
            assert line in str(rig.history(job)), rig.history(job)
    finally:
        os.remove(program)
        os.rmdir(folder)
