"""What a second on each kind of device is worth if all known work shall end as early as possible.

A job that needs r seconds and g devices of a kind takes r * g device-seconds there. With all rests known and moves at no cost, the earliest end
T of all of them is a linear program:

    min T    x[j, k] seconds of job j on kind k, sum over k of x[j, k] / r[j, k] = 1
             sum over j of g[j, k] * x[j, k] <= T * capacity[k]        price[k]
             sum over k of x[j, k] <= T                                 hurry[j]

In its dual a job costs r[j, k] * (g[j, k] * price[k] + hurry[j]) on kind k, and goes where it costs least: to the kind for which it has the comparative
advantage. `hurry` is above 0 only for critical jobs, which need all the time that is left; it draws them to the fast kinds. Prices rise
where more than T * capacity is asked for, until the loads are equal.

Source: Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning Workloads", OSDI 2020, sec. 4.2 (makespan); solved here
by multiplicative price steps with a soft choice, since a pass needs no exact vertex: within 0.1 % of the linear program on its trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

STEPS: Final = 100  # per pass; prices are kept between passes, so that they go on converging
_SHARPNESS: Final = 100.0  # a kind that costs 1 % more gets 1/e of the job: T is at most 1 % too high
_STEP: Final = 0.1  # of the logarithm of a price, for a load e times the others
_HURRY_STEP: Final = 10 * _STEP  # of the logarithm of a hurry: it must rise within the last minutes
_SMALLEST: Final = -6.0  # logarithm of a hurry that is as good as none
Rows = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Balance:
    """A division of the work.

    Attributes:
        end_s: T: time until all work can have ended.
        advantage: [job, kind] what the job's cost on its best kind is of its cost on this kind; 1 on the best, 0 where it cannot run.
        time_s: [job] seconds that the job runs in all.
    """

    end_s: float
    advantage: Rows
    time_s: Rows


class DevicePrices:
    """The prices, kept from pass to pass."""

    __slots__ = ("_hurry", "_prices")

    def __init__(self, kinds: int) -> None:
        self._prices: Rows = np.zeros(kinds)  # logarithms, the highest 0
        self._hurry: dict[int, float] = {}  # logarithms, by job

    def balance(self, seqs: list[int], rest_s: Rows, gpus: Rows, capacity: Rows) -> Balance:
        """Divide the work of at least one job; each can run somewhere.

        Args:
            seqs: of the jobs.
            rest_s: [job, kind] seconds; infinite where the job cannot run.
            gpus: [job, kind] devices.
            capacity: [kind] devices.
        """
        runs = np.isfinite(rest_s)
        work = np.where(runs, rest_s, 0.0)
        cost_s = np.log(np.where(runs, rest_s, 1.0))
        log_gpus = np.log(np.maximum(gpus, 1e-3))
        prices, hurry = self._prices, np.array([self._hurry.get(seq, _SMALLEST) for seq in seqs])
        shortest_s = float(rest_s.min(axis=1).max())  # no end is earlier
        best: Balance | None = None
        for number in range(STEPS if rest_s.shape[1] > 1 else 1):
            cost = np.where(runs, cost_s + np.logaddexp(log_gpus + prices, hurry[:, None]), np.inf)
            loss = cost - cost.min(axis=1, keepdims=True)
            share = np.exp(-_SHARPNESS * loss)
            run_s = share / share.sum(axis=1, keepdims=True) * work
            load_s = (run_s * gpus).sum(axis=0) / np.maximum(capacity, 1e-9)
            time_s = run_s.sum(axis=1)
            end_s = max(float(load_s.max()), float(time_s.max()))
            if best is None or end_s < best.end_s:
                best = Balance(end_s, np.exp(-loss), time_s)
            step = _STEP / (1.0 + 0.02 * number)
            goal_s = max(float(load_s.max()), shortest_s)
            prices = prices + step * np.log(np.maximum(load_s, 1e-6 * goal_s) / goal_s)
            prices = prices - prices.max()
            # 1 %: a job that needs less than 99 % of the time is in no hurry.
            hurry = hurry + _HURRY_STEP / (1.0 + 0.02 * number) * (
                np.log(np.maximum(time_s, 1e-6 * goal_s) / goal_s) + 0.01
            )
            hurry = np.maximum(hurry, _SMALLEST)
        assert best is not None
        self._prices, self._hurry = prices, dict(zip(seqs, hurry.tolist(), strict=True))
        return best
