"""The ledger of states between two heads: what is stored of it, and how it goes on after a time in which no head counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from phalanx.controller.usage.usage_accounting import UsageAccountant
from phalanx.core.accounting.state_ledger import HOUR_MS, Account, HourAmounts, Part
from phalanx.core.accounting.usage_states import UNOBSERVED, PartState, UsageState
from phalanx.core.ids import NodeId
from phalanx.core.resources import MILLI_PER_DEVICE
from phalanx.core.state.records import USAGE_HOURS
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.states import AttemptState
from phalanx.core.work.usage.usage_hour import UsageHour, UsageMark, UsageRow
from phalanx.ports.store import JobFilter, Store

ENDED_MAX: Final = 10_000  # jobs that ended while no head counted, and are read to replay that time
_LEAVING: Final = ("node_released", "node_forgotten")  # kinds of history lines of a node that no longer counts
_PAGE: Final = 1000  # history lines
_Change = tuple[int, int, Callable[[int], None]]  # when, order at the same time, what to do then


def usage_hour(hour_ms: int, found: HourAmounts) -> UsageHour:
    """The record of an hour of the ledger."""
    by_account: dict[Account, list[tuple[str, str, int]]] = {}
    for (account, state), amount in found.amounts.items():
        by_account.setdefault(account, []).append((state.state.value, state.note, amount))
    energy: dict[Account, list[tuple[str, int, int]]] = {}
    for (account, source), (millijoules, covered) in found.energy.items():
        energy.setdefault(account, []).append((source, millijoules, covered))
    throttled: dict[Account, list[tuple[str, int]]] = {}
    for (account, cause), amount in found.throttled.items():
        throttled.setdefault(account, []).append((cause, amount))
    rows = tuple(
        UsageRow(
            **account._asdict(),
            amounts=tuple(by_account.get(account, ())),
            energy=tuple(energy.get(account, ())),
            throttled=tuple(throttled.get(account, ())),
        )
        for account in {**by_account, **energy}
    )
    return UsageHour(id=str(hour_ms // 1000), fleet=found.fleet, rows=rows, millijoules=found.millijoules)


def hour_amounts(hour: UsageHour) -> HourAmounts:
    """The hour of the ledger that a record stores."""
    found = HourAmounts(fleet=hour.fleet, millijoules=hour.millijoules)
    for row in hour.rows:
        account = Account(row.model, row.pool, row.project, row.user, row.queue, row.job)
        for state, note, amount in row.amounts:
            found.amounts[account, PartState(UsageState(state), note)] = amount
        for source, millijoules, covered in row.energy:
            found.energy[account, source] = (millijoules, covered)
        for cause, amount in row.throttled:
            found.throttled[account, cause] = amount
    return found


def resume_ledger(accountant: UsageAccountant, world: World, store: Store, mark: UsageMark | None, now_ms: int) -> None:
    """Bring the ledger to `now_ms`: from what was stored, replay the time since in which no head counted.

    The records say when attempts began and ended and when nodes came and went; everything else is unknown, so all of it is noted as unobserved.
    Without a mark, nodes count from now on.
    """
    accountant.apply((*world.reservations.values(), *world.node_pools.values(), *world.jobs.values()), (), now_ms)
    if mark is not None:
        begin_ms = min(mark.until_ms, now_ms)
        _load_hours(accountant, store, begin_ms)
        for node in mark.nodes:
            accountant.energy.resume(node.id, node.meters)
        accountant.unobserved = True
        for at_ms, _, change in sorted(_changes(accountant, world, store, mark), key=lambda one: one[:2]):
            change(min(max(at_ms, begin_ms), now_ms))
        accountant.unobserved = False
    accountant.apply((*world.attempts.values(), *world.nodes.values(), *world.pool_nodes.values()), (), now_ms)
    accountant.update(now_ms)
    accountant.energy.keep_nodes(accountant.ledger.nodes)


def _load_hours(accountant: UsageAccountant, store: Store, begin_ms: int) -> None:
    hour_ms = begin_ms - begin_ms % HOUR_MS
    for at_ms in (hour_ms - HOUR_MS, hour_ms):
        stored = store.record(USAGE_HOURS, str(at_ms // 1000))
        if stored is not None:
            accountant.ledger.hours[at_ms] = hour_amounts(stored)


def _changes(accountant: UsageAccountant, world: World, store: Store, mark: UsageMark) -> Iterator[_Change]:
    """What happened since the mark, as far as the records say: nodes came, attempts ended and began, nodes left."""
    counted = {node.id for node in mark.nodes}

    def put(record: Any, at_ms: int) -> None:
        accountant.apply((record,), (), at_ms)
        accountant.update(at_ms)

    for member in world.pool_nodes.values():
        yield mark.until_ms if member.id in counted else int(member.requested_s * 1000), 0, partial(put, member)
    for node in world.nodes.values():
        yield mark.until_ms if node.id in counted else int(node.joined_s * 1000), 0, partial(put, node)
    for attempt in _ended_attempts(store, world, mark.until_ms):
        held = replace(attempt, state=AttemptState.RUNNING, ended_s=None, stop_cause=None, members=())
        yield int((attempt.ended_s or 0.0) * 1000), 1, partial(put, attempt)
        yield int(attempt.placed_s * 1000), 2, partial(put, held)
    for attempt in world.attempts.values():
        yield int(attempt.placed_s * 1000), 2, partial(put, attempt)
    for gone in mark.nodes:
        if gone.id not in world.nodes and gone.id not in world.pool_nodes:
            account = Account(model=gone.model, pool=gone.pool)
            part = Part(account, MILLI_PER_DEVICE, PartState(UsageState.DRAINING, UNOBSERVED))
            devices = dict.fromkeys(gone.devices, part)
            yield mark.until_ms, 0, partial(accountant.ledger.open_node, gone.id, devices)
            yield _left_ms(store, gone.id, mark.until_ms), 3, partial(accountant.ledger.close_node, gone.id)


def _ended_attempts(store: Store, world: World, since_ms: int) -> Iterator[Attempt]:
    """Attempts that ended since then, of jobs that ended and of jobs that were placed again or wait."""
    ended = store.jobs(JobFilter(ended_since_s=since_ms / 1000, limit=ENDED_MAX))
    again = [job for job in world.jobs.values() if not job.state.terminal and job.epoch > (job.id in world.attempts)]
    for job in (*ended, *again):
        for attempt in store.attempts(job.id):
            if attempt.ended_s is not None and attempt.ended_s * 1000 > since_ms:
                yield attempt


def _left_ms(store: Store, node_id: NodeId, since_ms: int) -> int:
    """When a node left the fleet since then, by its history; `since_ms` if that does not say."""
    found, after = since_ms, 0
    while lines := store.history(node_id=node_id, after=after, limit=_PAGE):
        found = max([found, *(int(line.at_s * 1000) for line in lines if line.kind in _LEAVING)])
        after = lines[-1].seq
    return found
