"""Formats the queue tree of `phalanx queues show` and the changes of `phalanx queues apply`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from phalanx.cli.impossible_jobs import impossible_lines
from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import NotFound
from phalanx.core.resources import amount_time_text, quantity_text
from phalanx.core.units import format_duration
from phalanx.core.work.nearest_match import suggestion
from phalanx.core.work.usage.waste_terms import IdlePolicy, alarms_text
from phalanx.user_files.queue_file import format_budget

if TYPE_CHECKING:
    from phalanx.wire.api.queues import QueuesApplied, QueueView

_COLUMNS: Final = (
    Column(title="QUEUE", min_width=8),
    Column(title="QUOTA", right=True),
    Column(title="USED", right=True),
    Column(title="BORROWED", right=True, drop_order=3),
    Column(title="LENT", right=True, drop_order=3),
    Column(title="RUNNING", right=True, drop_order=4),
    Column(title="WAITING", right=True),
    Column(title="GPUS", right=True, drop_order=2),
    Column(title="SHARE", right=True, drop_order=1),
    Column(title="BUDGET LEFT", right=True, drop_order=2, hide_empty=True),
    Column(title="WAITING BECAUSE", min_width=20, hide_empty=True),
)
_OTHER_COLUMNS: Final = (
    Column(title="QUEUE", min_width=8),
    Column(title="RESOURCE"),
    Column(title="QUOTA", right=True),
    Column(title="USED", right=True),
    Column(title="ROOM", right=True),
    Column(title="BORROWS", right=True, drop_order=2),
    Column(title="LENDS", right=True, drop_order=3),
    Column(title="A USER", right=True, drop_order=1),
)
_LABELS: Final = {
    "quota_gpus": "quota",
    "borrow_gpus": "borrow",
    "lend_gpus": "lend",
    "gpus_per_user": "users: gpus",
    "jobs_per_user": "users: jobs",
    "other_quotas": "quota of others than GPUs",
    "other_borrow": "borrow of others than GPUs",
    "other_lend": "lend of others than GPUs",
    "other_per_user": "users: others than GPUs",
    "budget_gpu_h": "budget",
    "budget_period_s": "budget period",
    "idle": "idle policy",
    "burst": "burst rule",
    "min_stay_s": "least time between moves",
    "fair_users": "fair between users",
    "half_life_s": "half-life of use",
}
_PLAIN: Final = str.maketrans("└├│─", "`|| ")  # for terminals without line-drawing characters
_NO_LIMIT: Final = {
    "quota": "none",
    "borrow": "all",
    "lend": "all",
    "parent": "the top",
    "idle": "as above",
    "alarms": "as above",
    "burst": "as above",
    "min_stay_s": "as above",
    "fair_users": "as above",
    "half_life_s": "the default",
}


def tree_view(queues: Sequence[QueueView], top: str | None) -> ListView:
    """Return the tree, or the subtree at the queue `top`.

    Raises:
        NotFound: there is no such queue; the hint names the nearest.
    """
    names = [queue.id for queue in queues]
    if top is not None and top not in names:
        raise NotFound(f"no queue {top!r}", hint=suggestion(top, names, "list them with phalanx queues"))
    drawn = list(_ordered(queues, top))
    extra = _limit_lines(drawn[0][0]) if top is not None else ()
    names_limited = sorted({name for queue, _ in drawn for name in queue.other_used})

    def lines(screen: Terminal) -> list[str]:
        found = table(_COLUMNS, [_row(queue, branch, screen) for queue, branch in drawn], screen)
        if names_limited:
            rows = [row for queue, _ in drawn for row in _other_rows(queue, names_limited)]
            found += ["", *table(_OTHER_COLUMNS, rows, screen)]
        return found

    waiting = next((queue.id for queue, _ in drawn if queue.pending), None)
    return ListView(
        value=[queue for queue, _ in drawn],
        lines=lines,
        next_command=f"phalanx ps -q {waiting}" if waiting else "phalanx queues apply FILE",
        notes=tuple(extra),
    )


def change_lines(applied: QueuesApplied, *, dry_run: bool) -> Iterator[str]:
    """Yield the changes, applied or planned: a line for each queue, and the totals."""
    for queue_id in applied.added:
        yield f"+ {queue_id}"
    for change in applied.changed:
        parts = (
            f"{_LABELS.get(name, name)} {_format_value(name, change.before.get(name))} -> {_format_value(name, change.after.get(name))}"
            for name in change.after
        )
        yield f"~ {change.id}: {', '.join(parts)}"
    for queue_id in applied.removed:
        yield f"- {queue_id}"
    done = "would be " if dry_run else ""
    yield (
        f"{len(applied.added)} {done}added, {len(applied.changed)} changed, {len(applied.removed)} removed, "
        f"{applied.unchanged} unchanged"
    )
    yield from impossible_lines(applied.impossible, applied.impossible_more, dry_run=dry_run)


def _ordered(queues: Sequence[QueueView], top: str | None) -> Iterator[tuple[QueueView, str]]:
    """Yield each queue after its parent, siblings by name, with the tree lines that precede its name."""
    children: dict[str | None, list[QueueView]] = {}
    names = {queue.id for queue in queues}
    for queue in sorted(queues, key=lambda queue: queue.id):
        children.setdefault(queue.parent if queue.parent in names else None, []).append(queue)
    roots = [queue for queue in queues if queue.id == top] if top is not None else children.get(None, [])
    stack = [(queue, "", "") for queue in reversed(roots)]
    while stack:
        queue, branch, below = stack.pop()
        yield queue, branch
        inside = children.get(queue.id, [])
        for place, child in reversed(list(enumerate(inside))):
            last = place == len(inside) - 1
            stack.append((child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")))


def _row(queue: QueueView, branch: str, screen: Terminal) -> list[Cell | str]:
    drawn = branch if screen.blocks else branch.translate(_PLAIN)
    name = Cell(drawn + queue.id + ("" if queue.open else " (closed)"), "" if queue.open else "red")
    left = queue.budget_left_gpu_h
    return [
        name,
        "-" if queue.quota_gpus is None else str(queue.quota_gpus),
        str(queue.used_gpus),
        Cell(str(queue.borrowed_gpus), "yellow") if queue.borrowed_gpus else "-",
        str(queue.lent_gpus) if queue.lent_gpus else "-",
        str(queue.running),
        str(queue.pending),
        str(queue.pending_gpus) if queue.pending else "-",
        f"{queue.factor:.2f}",
        ""
        if left is None
        else Cell(f"{left:,.0f} GPU-h" if abs(left) >= 1.0 else f"{left:.2g} GPU-h", "red" if left <= 0 else ""),
        _waiting_reasons(queue),
    ]


def _other_rows(queue: QueueView, names: Sequence[str]) -> Iterator[list[Cell | str]]:
    """Yield the resources besides GPUs of which the queue has terms, or of which its jobs hold some."""
    for name in names:
        parts = (queue.other_quotas, queue.other_borrow, queue.other_lend, queue.other_per_user)
        if not queue.other_used.get(name) and all(name not in part for part in parts):
            continue

        def text(part: Mapping[str, int], missing: str, name: str = name) -> str:
            return quantity_text(name, part[name], unit=False) if name in part else missing

        yield [
            queue.id,
            {"cpus": "CPUs"}.get(name, name),
            text(queue.other_quotas, "-"),
            text(queue.other_used, "0"),
            text(queue.other_room, "0"),
            text(queue.other_borrow, "any"),
            text(queue.other_lend, "all"),
            text(queue.other_per_user, "any"),
        ]


def _waiting_reasons(queue: QueueView) -> str:
    """Return the most common reasons; for a single reason also its detail."""
    if len(queue.waiting) == 1:
        wait = queue.waiting[0]
        return f"{wait.jobs} {wait.reason}: {wait.detail}" if wait.detail else f"{wait.jobs} {wait.reason}"
    return ", ".join(f"{wait.jobs} {wait.reason}" for wait in queue.waiting)


def _plural(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'s' * (number != 1)}"


def _limit_lines(queue: QueueView) -> Iterator[str]:
    """Yield the settings of one queue that are not in the table."""
    parts = [
        f"weight {queue.weight:g}",
        f"priority {queue.priority}",
        f"borrows {_format_value('borrow', queue.borrow_gpus)}",
        f"lends {_format_value('lend', queue.lend_gpus)}",
        f"room for {_plural(queue.room_gpus, 'GPU')} now",
    ]
    if queue.gpus_per_user is not None or queue.jobs_per_user is not None:
        parts.append(
            f"a user: {_format_value('', queue.gpus_per_user)} GPUs, {_format_value('', queue.jobs_per_user)} jobs"
        )
    if queue.budget_gpu_h is not None:
        parts.append(f"budget {format_budget(queue.budget_gpu_h, queue.budget_period_s)}")
    yield f"{queue.id}: {', '.join(parts)}"
    if queue.idle is not None:
        idle = queue.idle
        policy = IdlePolicy(
            action=idle.action,
            after_s=idle.after_s,
            grace_s=idle.grace_s,
            states=idle.states,
            exempt=idle.exempt,
        )
        yield f"  idle policy: {policy.text}"
    if queue.burst is not None:
        yield f"  burst: {queue.burst}"
    if queue.min_stay_s is not None:
        yield f"  least time between two moves of a job: {format_duration(queue.min_stay_s)}"
    if queue.half_life_s is not None:
        yield f"  half-life of use in the fair share: {format_duration(queue.half_life_s)}"
    for one in queue.users:
        yield f"  {one.user} used {amount_time_text('gpus', one.gpu_s)} lately, share {one.factor:.2f}"
    if queue.alarms:
        yield f"  alarms of waste: {alarms_text(queue.alarms.items())}"
    if queue.gpu_s or queue.other_s:
        spent = {"gpus": queue.gpu_s, **queue.other_s}
        period = format_budget(0, queue.budget_period_s).rpartition(" ")[2]
        used = ", ".join(amount_time_text(name, each) for name, each in spent.items() if each)
        yield f"  used in this period of {period}: {used}"
    for wait in queue.waiting:
        yield f"  {_plural(wait.jobs, 'job')} ({_plural(wait.gpus, 'GPU')}) wait{'s' * (wait.jobs == 1)}, {wait.reason}: {wait.detail}"


def _format_value(name: str, value: object) -> str:
    word = name.removesuffix("_gpus")
    if value is None:
        return _NO_LIMIT.get(word, "any")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return (
            " ".join(
                f"{one}={quantity_text(one, amount, unit=False).replace(' ', '')}" for one, amount in value.items()
            )
            or "none"
        )
    if name == "budget_period_s" and isinstance(value, (int, float)):
        return format_budget(0, value).rpartition(" ")[2]
    if name in ("min_stay_s", "half_life_s") and isinstance(value, (int, float)):
        return format_duration(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
