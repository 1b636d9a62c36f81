"""Nobody with a quota waits past its bound for what is his right, whoever floods the fleet and whatever the shares of users say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.scheduling.policies import PolicyParameters
from tests.builders import job, make_fleet, queue
from tests.cell import EVERY_S, Cell
from tests.effort import examples

SAVE_S = 20.0
FLOOD = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["ann", "bob", "cy"]), st.floats(60.0, 7200.0)),
    min_size=4,
    max_size=24,
)


@pytest.mark.parametrize("fair", [True, False])
@given(FLOOD, st.integers(1, 8), st.floats(0.0, 7200.0), st.integers(0, 2))
@settings(max_examples=examples(25), deadline=None)
def test_a_job_within_its_quota_starts_within_the_bound(fair, flood, gpus, after_s, spent):
    """The bound: the least time that the youngest borrower runs, the time in which it saves, and one look of the scheduler."""
    knobs = PolicyParameters()
    own, loan = queue("own", quota_gpus=8, fair_users=fair), queue("loan", quota_gpus=8, fair_users=fair)
    fleet = make_fleet("r: n0=8 n1=8").with_queues(own, loan)
    fleet = fleet.having_spent(own=10_000 * spent, loan=1, by_user={"ann": 5_000 * spent})
    cell = Cell(fleet, save_s=SAVE_S)
    for number, (size, user, lasts_s) in enumerate(flood):
        of = {"gpus": size, "queue": "loan", "user": user, "saves_on_stop": True}
        cell.submit(job(f"l{number}", **of), lasts_s=lasts_s)
    cell.go_on(after_s)
    cell.submit(job("mine", gpus=gpus, queue="own", user="ann"))
    cell.go_on(knobs.run_min_by_right_s + SAVE_S + 2 * EVERY_S)
    assert cell.runs("mine")
