"""Queue files read and refused by line; the tree and the changes drawn."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.cli.access.queue_tree import change_lines, tree_view
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadFile, NotFound
from phalanx.core.units import GIB
from phalanx.core.work.usage.waste_terms import IdleAction, WasteKind
from phalanx.user_files.queue_file import parse_queue_file, queue_file_text
from phalanx.wire.api.jobs import ImpossibleJobView
from phalanx.wire.api.queues import (
    IdleSettings,
    QueueChange,
    QueuesApplied,
    QueueSettings,
    QueueView,
    QueueWait,
)

WIDE = Terminal(width=200, height=40, interactive=False, colour=False, blocks=True)
TREE = """\
queues:
  research:
    quota: 32
    borrow: 16
    lend: none
    weight: 2.5
    users: {gpus: 8, jobs: 4}
    budget: 1000 GPU-h per 30d
    min_stay: 2m
    fair: users
    half_life: 3d
    queues:
      nlp: {quota: 16, borrow: none, open: false}
      vision:
  prod:
    lend: all
    priority: -5
"""


def test_a_tree_is_read_parents_first():
    assert parse_queue_file(TREE, path="q.yaml") == [
        QueueSettings(
            id="research",
            quota_gpus=32,
            borrow_gpus=16,
            lend_gpus=0,
            weight=2.5,
            gpus_per_user=8,
            jobs_per_user=4,
            budget_gpu_h=1000.0,
            budget_period_s=30 * 86400.0,
            min_stay_s=120.0,
            fair_users=True,
            half_life_s=3 * 86400.0,
        ),
        QueueSettings(id="nlp", parent="research", quota_gpus=16, borrow_gpus=0, open=False),
        QueueSettings(id="vision", parent="research"),
        QueueSettings(id="prod", priority=-5),
    ]


def test_quotas_of_other_resources_are_read_by_name():
    text = """
queues:
  a:
    quota: {gpus: 8, cpus: 64, memory: 512GiB, matlab: 4}
    borrow: {gpus: 2, cpus: none, matlab: all}
    lend: none
    users: {jobs: 4, cpus: 32, scratch: 1TiB}
  b: {quota: {memory: 64}, borrow: 4}
"""
    assert parse_queue_file(text, path="q.yaml") == [
        QueueSettings(
            id="a",
            quota_gpus=8,
            other_quotas={"cpus": 64, "memory": 512 * GIB, "matlab": 4},
            borrow_gpus=2,
            other_borrow={"cpus": 0},
            lend_gpus=0,
            other_lend={"cpus": 0, "memory": 0, "matlab": 0},
            jobs_per_user=4,
            other_per_user={"cpus": 32, "scratch": 1024 * GIB},
        ),
        QueueSettings(id="b", other_quotas={"memory": 64 * GIB}, borrow_gpus=4),
    ]


def test_resources_besides_gpus_have_a_table_of_their_own():
    found = QueueView(
        id="a",
        other_quotas={"cpus": 64, "memory": 512 * GIB},
        other_borrow={"cpus": 0},
        other_per_user={"matlab": 2},
        other_used={"cpus": 12, "matlab": 1, "memory": 0},
        other_room={"cpus": 52, "matlab": 7, "memory": 256 * GIB},
        gpu_s=7200.0,
        other_s={"cpus": 43200.0, "memory": 3600.0 * GIB},
    )
    view = tree_view([found], "a")
    assert view.lines(WIDE)[-4:] == [
        "QUEUE  RESOURCE    QUOTA  USED     ROOM  BORROWS  LENDS  A USER",
        "a      CPUs           64    12       52        0    all     any",
        "a      matlab          -     1        7      any    all       2",
        "a      memory    512 GiB   0 B  256 GiB      any    all     any",
    ]
    assert "  used in this period of 30d: 2.0 GPU-hours, 12.0 CPU-hours, 1.0 GiB-hours of memory" in view.notes


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("queues:\n  a: {quota: {cpu: 3}}", "q.yaml:2: unknown key 'cpu'", "did you mean 'cpus'?"),
        ("queues:\n  a: {quota: {cpus: many}}", "q.yaml:2: quota: cpus: 'many' is not a number of CPUs", "or none"),
        ("queues:\n  a: {quota: {memory: lots}}", "q.yaml:2: quota: memory: 'lots' is not an amount of memory", "64"),
        ("queues:\n  a: {lend: {matlab: -1}}", "q.yaml:2: lend: matlab: '-1' is not an amount", "2, 100GiB"),
        ("queues:\n  a: {borrow: {node: 1}}", "q.yaml:2: borrow: node is not an extra", "the key nodes"),
        ("queues:\n  a:\n    qouta: 3", "q.yaml:3: unknown key 'qouta'", "did you mean 'quota'?"),
        ("queues:\n  a: {nominalQuota: 3}", "q.yaml:2: unknown key 'nominalQuota'", "did you mean 'quota'?"),
        ("queue:\n  a: {}", "q.yaml:1: unknown key 'queue'", "did you mean 'queues'?"),
        ("queues:\n  a: {quota: many}", "q.yaml:2: quota: 'many' is not a number of GPUs", "a whole number or none"),
        ("queues:\n  a: {borrow: 1.5}", "q.yaml:2: borrow: '1.5' is not a number", "a whole number or all or none"),
        ("queues:\n  a: {weight: -1}", "q.yaml:2: weight: '-1' is not a number", "above 0"),
        ("queues:\n  a: {budget: 5 hours}", "q.yaml:2: budget: '5 hours' is not a budget", "1000 GPU-h per 30d"),
        ("queues:\n  a: {min_stay: 5}", "q.yaml:2: min_stay: '5' has no unit", "5m"),
        ("queues:\n  a: {budget: 5 GPU-h per 30}", "q.yaml:2: budget: '30' has no unit", "30h"),
        ("queues:\n  a: {open: yes}", "q.yaml:2: open: 'yes' is neither true nor false", ""),
        ("queues:\n  a:\n    users: {gpu: 1}", "q.yaml:3: unknown key 'gpu'", "did you mean 'gpus'?"),
        (
            "queues:\n  a:\n  b:\n    queues:\n      a:",
            "q.yaml:5: queue a is defined twice, here and on line 2",
            "unique",
        ),
        ("queues:\n  a:\n  a:", "q.yaml:3: a is defined twice, here and on line 2", ""),
        ("queues: [a, b]", "q.yaml:1: queues: expected keys and values, not a list", ""),
        ("queues:\n  a: &x {quota: 1}\n  b: *x", "q.yaml:2: anchors and aliases are not allowed in a queue file", ""),
        ("queues: 7", "q.yaml:1: queues: expected keys and values, not '7'", ""),
        ("- a", "q.yaml:1: a queue file has keys and values", "queues:"),
        ("hello", "q.yaml:1: a queue file has keys and values", "queues:"),
        ("", "q.yaml:1: empty file", "queues:"),
        ("queues:\n  a: {quota: 1", "not YAML", ""),
        ("queues: " + "{a: {queues: " * 40 + "}}" * 40, "q.yaml:1: nested more than 22 deep", ""),
    ],
)
def test_what_is_wrong_is_refused_by_line(text, message, hint):
    with pytest.raises(BadFile) as refused:
        parse_queue_file(text, path="q.yaml")
    assert message in refused.value.message
    assert hint in refused.value.hint


def views():
    wait = QueueWait(reason="quota", jobs=2, gpus=16, detail="queue nlp holds 16 of at most 16 GPUs")
    return [
        QueueView(
            id="nlp",
            parent="research",
            quota_gpus=16,
            used_gpus=16,
            running=2,
            pending=2,
            pending_gpus=16,
            factor=0.5,
            waiting=[wait],
        ),
        QueueView(id="prod", quota_gpus=32, used_gpus=24, lent_gpus=8, open=False),
        QueueView(
            id="research", quota_gpus=32, used_gpus=40, borrowed_gpus=8, budget_gpu_h=1e3, budget_left_gpu_h=-2.0
        ),
        QueueView(id="vision", parent="research"),
    ]


def test_the_tree_is_drawn_with_its_figures_and_who_waits():
    lines = tree_view(views(), None).lines(WIDE)
    assert [line.split()[0] for line in lines[1:]] == ["prod", "research", "├─", "└─"]
    assert "prod (closed)" in lines[1]
    assert lines[2].split()[1:5] == ["32", "40", "8", "-"]
    assert "-2 GPU-h" in lines[2]
    small = QueueView(id="small", budget_gpu_h=0.001, budget_left_gpu_h=-0.00125, room_gpus=1)
    assert "-0.0013 GPU-h" in tree_view([small], None).lines(WIDE)[1]
    assert "room for 1 GPU now" in tree_view([small], "small").notes[0]
    assert lines[3].split()[2:11] == ["16", "16", "-", "-", "2", "2", "16", "0.50", "2"]
    assert lines[3].endswith("2 quota: queue nlp holds 16 of at most 16 GPUs")


def test_one_queue_is_shown_with_all_below_and_its_limits():
    shown = tree_view(views(), "research")
    assert [queue.id for queue in shown.value] == ["research", "nlp", "vision"]
    assert shown.notes == (
        "research: weight 1, priority 0, borrows all, lends all, room for 0 GPUs now, budget 1000 GPU-h per 30d",
    )
    assert shown.next_command == "phalanx ps -q nlp"
    with pytest.raises(NotFound) as refused:
        tree_view(views(), "reserch")
    assert refused.value.hint == "did you mean research?"


def test_changes_are_told_one_a_line():
    change = QueueChange(
        id="nlp",
        before={"quota_gpus": None, "lend_gpus": 4, "budget_period_s": 86400.0, "min_stay_s": None},
        after={"quota_gpus": 16, "lend_gpus": None, "budget_period_s": 7200.0, "min_stay_s": 120.0},
    )
    told = QueuesApplied(added=["vision"], changed=[change], removed=["old"], unchanged=3)
    assert list(change_lines(told, dry_run=False)) == [
        "+ vision",
        "~ nlp: quota none -> 16, lend 4 -> all, budget period 1d -> 2h, least time between moves as above -> 2m00s",
        "- old",
        "1 added, 1 changed, 1 removed, 3 unchanged",
    ]


def test_jobs_that_a_change_makes_impossible_are_named_below_it():
    why = "8 GPUs asked; queue nlp allows 6 a user"
    told = QueuesApplied(impossible=[ImpossibleJobView(id="7", why=why)], impossible_more=2)
    assert list(change_lines(told, dry_run=False))[1:] == [
        "3 waiting jobs can never start any more:",
        f"  job 7: {why}",
        "  and 2 more",
    ]
    alone = QueuesApplied(impossible=told.impossible)
    assert list(change_lines(alone, dry_run=True))[1] == "1 waiting job could never start any more:"


WASTE = """\
queues:
  research:
    idle: {after: 30m, action: Release, grace: 5m, states: [idle, low], exempt: keep-gpus=yes}
    alarms: {idle: 10m, low: off, hung: 90s}
    queues:
      debug: {idle: off}
"""


def test_idle_policies_and_alarms_are_read():
    research, debug = parse_queue_file(WASTE, path="q.yaml")
    assert research.idle == IdleSettings(
        action=IdleAction.RELEASE,
        after_s=1800.0,
        grace_s=300.0,
        states=(WasteKind.IDLE, WasteKind.LOW),
        exempt="keep-gpus=yes",
    )
    assert research.alarms == {WasteKind.IDLE: 600.0, WasteKind.LOW: None, WasteKind.HUNG: 90.0}
    assert debug.idle == IdleSettings(action=IdleAction.OFF)


@pytest.mark.parametrize(
    ("keys", "why", "hint"),
    [
        ("idle: {action: stop}", "idle: after is missing", "write idle: {after: 1h, action: release}"),
        ("idle: {after: 1h}", "idle: action is missing", ""),
        ("idle: {after: 1h, action: kill}", "idle: action: 'kill' is not known", "warn, notify, release, stop"),
        ("idle: {after: soon, action: stop}", "idle: after", ""),
        ("idle: {after: 1h, action: stop, states: [idel]}", "'idel' is not known", "idle"),
        ("idle: {time_window: 1h, action: stop}", "unknown key 'time_window'", "after"),
        ("idle: 30m", "expected keys and values", ""),
        ("idle: {after: 1h, action: stop, exempt: [a]}", "expected one value", ""),
        ("alarms: {broken: 1h}", "'broken' is no waste of jobs", "one of"),
        ("alarms: {idle: [1h]}", "expected one value", ""),
    ],
)
def test_wrong_idle_policies_name_the_line_and_the_right_words(keys, why, hint):
    with pytest.raises(BadFile) as caught:
        parse_queue_file(f"queues:\n  a:\n    {keys}\n", path="q.yaml")
    assert caught.value.message.startswith("q.yaml:3:")
    assert why in caught.value.message
    assert hint in caught.value.hint


def test_a_queue_shows_its_idle_policy():
    view = QueueView(
        id="research",
        idle=IdleSettings(action=IdleAction.RELEASE, after_s=1800.0, exempt="keep"),
        alarms={WasteKind.LOW: None, WasteKind.IDLE: 600.0},
        min_stay_s=90.0,
    )
    notes = tree_view([view], "research").notes
    assert (
        "  idle policy: release after 30m00s idle or unoccupied, warning 5m00s before, not jobs with label keep"
        in notes
    )
    assert "  alarms of waste: low off, idle 10m00s" in notes
    assert "  least time between two moves of a job: 1m30s" in notes


def test_queues_are_written_as_a_file_that_says_the_same():
    queues = parse_queue_file(TREE, path="q.yaml")
    odd = [
        QueueSettings(
            id="odd.q@x",
            quota_gpus=None,
            other_quotas={"cpus": 12, "memory": (3 << 40) + 1025, "matlab": 4, "scratch": 7 << 30},
            borrow_gpus=0,
            other_borrow={"memory": (1 << 30) + 1},
            lend_gpus=3,
            weight=0.125,
            gpus_per_user=0,
            other_per_user={"matlab": 1},
            budget_gpu_h=12.5,
            budget_period_s=90_061.5,
            idle=IdleSettings(action=IdleAction.STOP, after_s=5400.0, grace_s=90.0, exempt="it's=#1"),
            alarms={WasteKind.IDLE: 0.5, WasteKind.LOW: None, WasteKind.HUNG: 86_400.0},
            min_stay_s=90.5,
        ),
        QueueSettings(id="off", idle=IdleSettings(action=IdleAction.OFF)),
        QueueSettings(id="bare"),
    ]
    by_id = sorted([*queues, *odd], key=lambda queue: queue.id)
    found = parse_queue_file(queue_file_text([*queues, *odd]), path="q.yaml")
    assert sorted(found, key=lambda queue: queue.id) == by_id
    assert [queue.id for queue in found] == ["bare", "odd.q@x", "off", "prod", "research", "nlp", "vision"]
