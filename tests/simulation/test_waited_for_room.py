"""Found by seed 700000: a job whose room took long to become free had spent its guaranteed run before it began."""

from phalanx.simulator.drill.workload import FAST_POLICY
from tests.harness import Harness
from tests.simulated_node import JobBehaviour


def test_the_guaranteed_run_begins_with_the_start_and_not_with_the_decision():
    cluster = Harness(policy=FAST_POLICY)
    slow_to_go = cluster.submit(gpus="3x4", grace_s=30.0, behaviour=JobBehaviour(run_s=1000.0, ignores_sigterm=True))
    cluster.runs(slow_to_go)
    cluster.run(10.0)
    urgent = cluster.submit(gpus="3x4", priority=2, behaviour=JobBehaviour(run_s=50.0))
    cluster.runs(urgent)
    assert cluster.head is not None
    begun_s, entry = cluster.live(urgent).placed_s, cluster.head.controller.scheduler.entries[urgent]
    assert begun_s - cluster.job(urgent).submit_s > FAST_POLICY.parameters.run_min_s, (
        "its room took longer than its guaranteed run"
    )
    assert entry.protected_until_s >= begun_s + FAST_POLICY.parameters.run_min_s
