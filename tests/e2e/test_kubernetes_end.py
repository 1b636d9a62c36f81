"""One job in a pod, and the end of its head: the smallest run of the engine `kubernetes` with real processes."""

import pytest

from benchmarks.cluster import wait_until
from tests.contract.engine_rigs import gated
from tests.contract.kubernetes_rig import kubernetes

pytestmark = [pytest.mark.serial, pytest.mark.e2e]


def test_the_end_of_a_head_leaves_no_object_of_it():
    with kubernetes() as rig:
        job = gated(rig, "never", gpus="1")
        wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs in its pod")
        assert [name.partition("/")[0] for name in rig.objects()] == ["configmaps", "pods", "secrets"]
        rig.stop()
        wait_until(lambda: rig.objects() == [], "nothing is left")
