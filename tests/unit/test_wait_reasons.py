"""Why jobs wait, read while the head goes on."""

# mypy: disable-error-code="arg-type,comparison-overlap"

import threading
from collections.abc import Mapping

from phalanx.controller.waits import GuardedWaits
from phalanx.core.state.plan import WaitReason
from phalanx.core.work.states import WaitReasonCode

WAIT = WaitReason(reason=WaitReasonCode.QUOTA, detail="")


class Leaving(Mapping):
    """Waits of which each second job begins between two looks."""

    def __iter__(self):
        return iter(range(10))

    def __len__(self):
        return 10

    def __getitem__(self, number):
        if number % 2:
            raise KeyError(number)
        return WAIT


def test_jobs_that_begin_while_they_are_read_are_left_out():
    waits = GuardedWaits(Leaving(), threading.Lock())
    assert list(waits.values()) == [WAIT] * 5
    assert dict(waits.items()) == dict.fromkeys(range(0, 10, 2), WAIT)
