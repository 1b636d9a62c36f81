"""What real tasks leave behind when they die is found, judged, and acted on: output, signals, codes, an order of deaths."""

import pytest

from benchmarks.cluster import cluster

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(120)]
ONCE = "test $PHALANX_RESTART_COUNT -gt 0 && exit 0;"


@pytest.fixture(scope="module")
def head():
    with cluster("2x2") as running:
        yield running


def ended(head, script, **body):
    job = head.submit(run=f"sh -c '{script}'", tasks_per_node=2, gpus="1x2", **body)
    return job, head.wait_for_state(job, "succeeded", "failed")


def verdicts(head, job):
    return [line["text"] for line in head.history(job) if line["kind"] == "verdict"]


DEATHS = [
    # what the tasks do                                            how it ends, after how many restarts, and the rule that said so
    (f'{ONCE} echo "ValueError: no"; exit 1', "failed", 0, "python-error: user"),
    (f'{ONCE} echo "torch.OutOfMemoryError: CUDA out of memory"; exit 1', "failed", 0, "cuda-out-of-memory: user"),
    (f"{ONCE} test $RANK = 1 && kill -SEGV $$; sleep 60", "succeeded", 1, "segfault: infrastructure"),
    (f"{ONCE} test $RANK = 1 && exit 139; sleep 60", "succeeded", 1, "segfault: infrastructure"),
    (f"{ONCE} test $RANK = 1 && kill -9 $$; sleep 60", "succeeded", 1, "killed: infrastructure"),
    (f'{ONCE} echo "RuntimeError: Connection closed by peer"; exit 1', "succeeded", 1, "peer-gone: echo"),
    (
        f'{ONCE} test $RANK = 1 && echo "No space left on device" && exit 1; sleep 60',
        "succeeded",
        1,
        "no-space: infrastructure",
    ),
]


@pytest.mark.parametrize(("script", "state", "restarts", "rule"), DEATHS)
def test_death_is_judged_by_its_evidence(head, script, state, restarts, rule):
    job, view = ended(head, script)
    assert view["state"] == state, head.history(job)
    assert len(verdicts(head, job)) == restarts + (state == "failed")
    assert f"({rule})" in verdicts(head, job)[0]


def test_cause_is_named_beside_its_echo(head):
    script = 'test $RANK = 1 && echo "KeyError: 3" && exit 7; sleep 0.05; echo "RuntimeError: Connection reset by peer"; exit 1'
    job, view = ended(head, script)
    assert (view["state"], view["exit_code"]) == ("failed", 7), head.history(job)
    assert verdicts(head, job)[0].startswith("rank 1 on ")


def test_values_of_its_variables_do_not_get_into_the_history(head):
    job, view = ended(head, 'echo "ValueError: $KEY"; exit 1', env={"KEY": "canary-55aa77"})
    assert view["state"] == "failed"
    assert "ValueError: ***" in verdicts(head, job)[0]
    assert "canary-55aa77" not in str(head.history(job))
