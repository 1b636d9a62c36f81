"""What ends a user's session in a job whose attempt has ended: only a node that does not report how it did."""

# mypy: disable-error-code="arg-type"

from types import SimpleNamespace

import pytest

from phalanx.api.live.exec_start import check_while_running
from phalanx.core.errors import Conflict
from phalanx.core.work.states import AttemptState


class Head:
    """A head with one job; `attempts` are the job's, `now_s` is its clock."""

    def __init__(self):
        self.now_s, self.attempts = 100.0, [SimpleNamespace(job_id="7", epoch=1, state=AttemptState.RUNNING)]
        self.store = SimpleNamespace(attempts=lambda _job: self.attempts)
        self.clock = SimpleNamespace(boottime_s=lambda: self.now_s)


@pytest.mark.parametrize("end", ["ended", "a newer attempt", "archived"])
def test_a_session_ends_some_seconds_after_an_attempt_whose_node_is_silent(end):
    head = Head()
    check = check_while_running(head, head.attempts[0], lambda: None)
    check()
    if end == "ended":
        head.attempts[0].state = AttemptState.ENDED
    elif end == "archived":
        head.attempts = []
    else:
        head.attempts = [*head.attempts, SimpleNamespace(job_id="7", epoch=2, state=AttemptState.RUNNING)]
    check()
    head.now_s += 4.0
    check()
    head.now_s += 1.0
    with pytest.raises(Conflict, match="did not report"):
        check()


def test_a_session_whose_end_is_reported_goes_on_until_its_user_has_read_all():
    """Found by review: a slow reader lost the rest of the output, and was told that the node had not reported."""
    head, reported = Head(), list[int]()
    check = check_while_running(head, head.attempts[0], lambda: None, lambda: bool(reported))
    head.attempts[0].state = AttemptState.ENDED
    check()
    reported.append(0)
    head.now_s += 1000.0
    check()


def test_a_user_who_may_no_longer_is_cut_off_also_then():
    head = Head()

    def refused():
        raise Conflict("no longer")

    with pytest.raises(Conflict, match="no longer"):
        check_while_running(head, head.attempts[0], refused, lambda: True)()
