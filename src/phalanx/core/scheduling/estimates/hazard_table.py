"""Estimates remaining run times from attained service: an online hazard table by gang size, and the Gittins index derived from it.

Source: Gittins, Glazebrook, Weber, "Multi-armed Bandit Allocation Indices" (2nd ed. 2011), ch. 1 and 2: for a job with attained service `a`, the index
is max over D of P(S - a <= D | S > a) / E[min(S - a, D) | S > a]; serving the highest index minimises the mean flow time if stopping is free.
Aalto, Ayesta, Righter, "On the Gittins index in the M/G/1 queue" (Queueing Systems 63, 2009).

Ended jobs count as events in the bin they ended in and as time at risk in the bins before; running jobs count only as time at risk
(so the table is not biased to short jobs while long ones are still running).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

FIRST_EDGE_S: Final = 15.0  # a quarter of the round: decisions every 60 s cannot distinguish shorter times
BINS_PER_OCTAVE: Final = 2  # attained service to within 41 %: the index of a heavy tail changes as 1 / a
BINS: Final = 44  # the last begins at 15 s x 2^21.5 = 514 days
# 1, 2, 3-4, 5-8, 9-16, more: gangs of a size behave similarly, and larger ones are too few to distinguish
SIZES: Final = 6
PRIOR_EVENTS: Final = 1.0  # the prior's weight in each bin: one event
# Hazard 0.5 / t: a Pareto tail of index 1/2, for a fleet about which only is known that long jobs stay long
PRIOR_SHAPE: Final = 0.5
POOL_EVENTS: Final = 4.0  # a size's own data outweigh those of all sizes once it has four ends in a bin

Hazard = NDArray[np.float64]  # ends per second of service, by bin
EDGES_S: Final = (0.0, *(FIRST_EDGE_S * 2.0 ** (k / BINS_PER_OCTAVE) for k in range(BINS - 1)))
_BEGINS: Final = [
    edge_s * (1.0 - 3e-10) for edge_s in EDGES_S[1:]
]  # services that were summed up may miss their edge by a rounding


def bin_of(attained_s: float) -> int:
    """The bin of `attained_s`; negative service counts as none."""
    return bisect_right(_BEGINS, attained_s)


def size_of(gpus: int) -> int:
    """The size class of a gang."""
    return min((gpus - 1).bit_length(), SIZES - 1)


GROUP_DECAY: Final = 0.9  # about the last ten ends of a group count: users change their habits
# Candidates for the number of ends in a bin from which a group's data outweigh those of its size.
PRIOR_ENDS: Final = (1.0, 4.0, 16.0, 64.0, 1e9)
# An end also counts in the neighbouring bins: similar jobs differ by a factor of about two (residual of siblings' log durations, Philly).
KERNEL: Final = ((-2, 0.1), (-1, 0.2), (0, 0.4), (1, 0.2), (2, 0.1))


# Jobs of one group that are submitted shortly after one another are one sweep, more similar than their group.
BURST_GAP_S: Final = 600.0
# Up to 4 GPUs; of larger gangs too few end in one burst to be representative (measured: with bursts, they starve).
BURST_SIZES: Final = 3
BURST_PRIOR_ENDS: Final = (0.25, 1.0, 4.0, 16.0, 1e9)
BURST_KERNEL: Final = ((-1, 0.25), (0, 0.5), (1, 0.25))  # narrower: jobs of a sweep are more similar


class RunningJob(Protocol):
    """A job that has begun."""

    def service_s(self, now_s: float) -> float:
        """Its saved work so far."""


class SimilarJobs:
    """Similar jobs: of one queue (live: of one user and name) and one number of GPUs; or one burst of these. The newest ends count most.

    Attributes:
        parent: the group of a burst; None for a group.
        burst: a group's newest burst, and `last_submit_s` its newest submit.
        refit_number: the `refit` that its index is from; -1 if it must be recomputed.
    """

    __slots__ = (
        "active",
        "burst",
        "ends",
        "hazard",
        "index",
        "last_submit_s",
        "parent",
        "refit_number",
        "risk",
        "size",
    )

    def __init__(self, gpus: int, parent: SimilarJobs | None = None) -> None:
        self.size = size_of(gpus)
        self.parent = parent
        self.burst: SimilarJobs | None = None
        self.last_submit_s = 0.0
        self.ends = np.zeros(BINS)
        self.risk = np.zeros(BINS)
        self.hazard = np.zeros(BINS)
        self.active: dict[int, RunningJob] = {}
        self.refit_number = -1
        self.index: list[float] = []

    def add_running(self, seq: int, job: RunningJob) -> None:
        """One of its jobs runs; it and its group count it as time at risk."""
        self.active[seq] = job
        if self.parent is not None:
            self.parent.active[seq] = job

    def remove_running(self, seq: int) -> None:
        """The job no longer runs."""
        self.active.pop(seq, None)
        if self.parent is not None:
            self.parent.active.pop(seq, None)


class HazardTable:
    """Counts, and the index computed from them at the last `refit`.

    Attributes:
        hazard: per size and bin, ends per second of service, at the last `refit`.
        events, served_s: number of ended jobs, and their service.
        evidence: log-likelihood of each trust per size; `trust` is the best of them. The same for bursts.
        refits: number of refits.
    """

    def __init__(self) -> None:
        edges = np.array([*EDGES_S, EDGES_S[-1] * 4.0])
        self._low = edges[:-1]
        self._width = np.diff(edges)
        self._widths: list[float] = self._width.tolist()
        self._ends = np.zeros((SIZES, BINS))
        self._risk = np.zeros((SIZES, BINS))
        self.events = 0
        self.served_s = 0.0
        self.hazard = np.zeros((SIZES, BINS))
        self._groups: dict[int, dict[int, SimilarJobs]] = {}  # by label, then by GPUs
        self._trusts = np.array(PRIOR_ENDS)[:, None]
        self.evidence = np.zeros((SIZES, len(PRIOR_ENDS)))
        self.trust = [PRIOR_ENDS[-1]] * SIZES
        self._burst_trusts = np.array(BURST_PRIOR_ENDS)[:, None]
        self.burst_evidence = np.zeros((SIZES, len(BURST_PRIOR_ENDS)))
        self.burst_trust = [BURST_PRIOR_ENDS[-1]] * SIZES
        self.refits = 0
        self.refit(())

    def copy(self) -> HazardTable:
        """A copy of the statistics without running jobs, for a trial that must not change them. Safe while another thread learns."""
        other = HazardTable()
        other._ends, other._risk, other.hazard = self._ends.copy(), self._risk.copy(), self.hazard.copy()
        other.events, other.served_s, other.evidence = self.events, self.served_s, self.evidence.copy()
        other.trust, other.size_index = list(self.trust), list(self.size_index)
        for label, sizes in list(self._groups.items()):
            copies = other._groups[label] = {}
            for gpus, group in list(sizes.items()):
                group_copy = copies[gpus] = SimilarJobs(gpus)
                group_copy.ends, group_copy.risk = group.ends.copy(), group.risk.copy()
        return other

    def group(self, label: int, gpus: int) -> SimilarJobs:
        """The group of a job."""
        sizes = self._groups.setdefault(label, {})
        group = sizes.get(gpus)
        if group is None:
            group = sizes[gpus] = SimilarJobs(gpus)
        return group

    def groups(self) -> Iterator[SimilarJobs]:
        """All groups; they refer to their bursts."""
        return itertools.chain.from_iterable(sizes.values() for sizes in self._groups.values())

    def drop_label(self, label: int) -> None:
        """Drop the groups of a label. Its running jobs keep their group; the sizes keep what they learned from it."""
        self._groups.pop(label, None)

    def burst(self, label: int, gpus: int, submit_s: float) -> SimilarJobs:
        """The burst of a job submitted now; its group if bursts are not used for its size."""
        group = self.group(label, gpus)
        if group.size >= BURST_SIZES:
            return group
        if group.burst is None or abs(submit_s - group.last_submit_s) > BURST_GAP_S:
            group.burst = SimilarJobs(gpus, group)
        group.last_submit_s = submit_s
        return group.burst

    def drop_running(self) -> None:
        """Drop all running jobs: the board is rebuilt, and reports each of them again."""
        for group in self.groups():
            group.active.clear()
            if group.burst is not None:
                group.burst.active.clear()

    def record_end(self, burst: SimilarJobs, service_s: float) -> None:
        """A job of this burst (or group) ended with this service."""
        group = burst.parent or burst
        size, last = group.size, bin_of(service_s)
        self._score_trusts(group, burst, service_s, last)
        self._ends[size, last] += 1.0
        group.ends *= GROUP_DECAY
        group.risk *= GROUP_DECAY
        counted = [(group, KERNEL)] if burst is group else [(group, KERNEL), (burst, BURST_KERNEL)]
        for one, kernel in counted:
            for off, share in kernel:
                one.ends[min(max(last + off, 0), BINS - 1)] += share
            one.refit_number = -1
        for risk in (self._risk[size], *(one.risk for one, _ in counted)):
            risk[:last] += self._width[:last]
            risk[last] += service_s - EDGES_S[last]
        self.events += 1
        self.served_s += service_s

    def _score_trusts(self, group: SimilarJobs, burst: SimilarJobs, service_s: float, last: int) -> None:
        """Score how well each trust predicted this end, before it is counted: the log-likelihood, summed per size.

        Source: A. P. Dawid, "Statistical theory: the prequential approach", J. R. Statist. Soc. A 147 (1984).
        """
        size = group.size
        base = self.hazard[size]
        self.evidence[size] += self._log_likelihood(group, self._trusts, base, service_s, last)
        if burst is not group:
            trust = self.trust[size]
            middle = (group.ends + trust) / (group.risk + trust / base)
            self.burst_evidence[size] += self._log_likelihood(burst, self._burst_trusts, middle, service_s, last)
            self.burst_trust[size] = BURST_PRIOR_ENDS[int(np.argmax(self.burst_evidence[size]))]
        self.trust[size] = PRIOR_ENDS[int(np.argmax(self.evidence[size]))]

    def _log_likelihood(self, group: SimilarJobs, trusts: Hazard, base: Hazard, service_s: float, last: int) -> Hazard:
        hazard = (group.ends + trusts) / (group.risk + trusts / base)
        lived = hazard[:, :last] @ self._width[:last] + hazard[:, last] * (service_s - EDGES_S[last])
        return np.asarray(np.log(hazard[:, last]) - lived)

    def refit(self, active: Iterable[tuple[int, float]]) -> None:
        """Recompute the hazards; `active` are (gpus, service so far) of the jobs that have begun and not ended."""
        risk = self._risk + self._at_risk(active)
        middle = self._low + self._width / 2.0
        prior = PRIOR_SHAPE / middle
        pooled = (self._ends.sum(axis=0) + PRIOR_EVENTS) / (risk.sum(axis=0) + PRIOR_EVENTS / prior)
        self.hazard = (self._ends + POOL_EVENTS) / (risk + POOL_EVENTS / pooled)
        self.size_index = gittins(self.hazard[0].tolist(), self._widths)
        self.refits += 1

    def _at_risk(self, active: Iterable[tuple[int, float]]) -> NDArray[np.float64]:
        """Service of jobs not yet ended, by size and bin: whole bins before the current one, and the part of the current one."""
        pairs = [(size_of(gpus), bin_of(service_s), service_s) for gpus, service_s in active if service_s > 0.0]
        risk = np.zeros((SIZES, BINS))
        if not pairs:
            return risk
        size, last, service_s = (np.array(column) for column in zip(*pairs, strict=True))
        ending = np.zeros((SIZES, BINS))
        np.add.at(ending, (size, last), 1.0)
        beyond = ending[:, ::-1].cumsum(axis=1)[:, ::-1] - ending  # jobs that are past each bin
        np.add.at(risk, (size, last), service_s - np.array(EDGES_S)[last])
        return risk + beyond * self._width

    def index_of(self, group: SimilarJobs, now_s: float) -> list[float]:
        """The group's or burst's index per bin; its jobs still running count as time at risk."""
        if group.refit_number != self.refits or not group.index:
            index = gittins(self._hazard_of(group, now_s).tolist(), self._widths)
            if group.size == 0:
                # Single GPUs get the better of the two: they are probed cheaply, and sweeps of several users mix.
                index = [max(own, others) for own, others in zip(index, self.size_index, strict=True)]
            group.index = index
        return group.index

    def _hazard_of(self, group: SimilarJobs, now_s: float) -> Hazard:
        if group.refit_number == self.refits:
            return group.hazard
        group.refit_number = self.refits
        group.index = []
        parent = group.parent
        if parent is None:
            base, trust = self.hazard[group.size], self.trust[group.size]
        else:
            base, trust = self._hazard_of(parent, now_s), self.burst_trust[group.size]
        risk = group.risk
        if group.active:
            jobs, within_s = [0] * BINS, [0.0] * BINS  # by the bin that they are in
            for entry in group.active.values():
                service_s = entry.service_s(now_s)
                if service_s > 0.0:
                    last = bisect_right(_BEGINS, service_s)
                    jobs[last] += 1
                    within_s[last] += service_s - EDGES_S[last]
            beyond = np.array(jobs[::-1]).cumsum()[::-1] - jobs  # jobs that are past each bin
            risk = risk + beyond * self._width + within_s
        group.hazard = (group.ends + trust) / (risk + trust / base)
        return group.hazard


def gittins(hazard: Sequence[float], width: Sequence[float]) -> list[float]:
    """The index at the start of each bin for a hazard constant within bins: the best rate over all look-aheads that end at a bin's end.

    From the last bin to the first: a bin's best look-ahead is itself, extended by the best look-ahead from its end as long as that rate is
    higher. Each stretch is joined once, so the cost is linear in the bins.
    """
    index = [0.0] * len(hazard)
    # (probability of ending, expected service) of the stretches that follow, the next one last
    ahead: list[tuple[float, float]] = []
    for at in range(len(hazard) - 1, -1, -1):
        ends = -math.expm1(-hazard[at] * width[at])
        spent_s = ends / hazard[at]  # E[min(S, width)] within the bin, given that it is reached
        while ahead and ahead[-1][0] * spent_s > ends * ahead[-1][1]:
            later_ends, later_s = ahead.pop()
            survives = 1.0 - ends
            ends += survives * later_ends
            spent_s += survives * later_s
        ahead.append((ends, spent_s))
        index[at] = ends / spent_s
    return index
