"""Spells of waste and their alarms, what mends each kind of waste, and the settings of queues for both."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

from dataclasses import replace

import pytest

from phalanx.core.accounting.usage_alarms import Seen, SpellTracker, WastedPart, WasteSighting
from phalanx.core.accounting.waste_advice import ADVICE, remedy
from phalanx.core.errors import BadRequest
from phalanx.core.work.queue import alarm_after_s, idle_policy
from phalanx.core.work.quotas.queue_validation import check_queue_tree
from phalanx.core.work.services.service_terms import ReplicaPosition, ServiceTerms
from phalanx.core.work.usage.waste_terms import ALARM_AFTER_S, IdleAction, IdlePolicy, WasteKind
from phalanx.web.command_hints import render_hint
from tests.builders import job, queue

K = WasteKind
MINUTE_MS = 60_000


class Watch:
    """One job on one GPU, looked at every five seconds."""

    def __init__(self, after_s=600.0):
        self.after_s, self.now_ms, self.since_ms = after_s, 0, 0
        self.tracker = SpellTracker(str)
        self.began_ms = []
        self.spell = None

    def for_s(self, seconds, *, idle):
        self.since_ms = self.now_ms
        for _ in range(int(seconds / 5)):
            self.now_ms += 5000
            seen = [Seen("17", "idle", (WastedPart(1000, self.since_ms),), self.after_s)] if idle else []
            before = self.tracker.begun.total()
            found = self.tracker.update(seen, self.now_ms)
            self.spell = found[0] if found else None
            if self.tracker.begun.total() > before:
                self.began_ms.append(self.now_ms)
        return self


def test_an_alarm_begins_at_its_threshold_and_ends_by_itself():
    watch = Watch().for_s(595, idle=True)
    assert not watch.spell.alarmed
    watch.for_s(5, idle=True)
    assert watch.spell.alarmed
    assert watch.spell.lost == 600 * 1_000_000, "from the first second, not from the threshold"
    assert watch.for_s(90, idle=False).spell is None


def test_a_short_burst_neither_restarts_the_time_nor_repeats_the_alarm():
    watch = Watch().for_s(400, idle=True).for_s(30, idle=False).for_s(200, idle=True)
    assert watch.spell.alarmed
    assert watch.spell.lost == 600 * 1_000_000, "the burst is no waste"
    for _ in range(20):
        watch.for_s(40, idle=False).for_s(40, idle=True)
    assert len(watch.began_ms) == 1


def test_a_short_threshold_is_not_met_by_a_pause():
    watch = Watch(after_s=20.0).for_s(15, idle=True).for_s(10, idle=False)
    assert watch.spell is None


def sighting(kind, milli=1000, held=1000, nodes=("n0",), **fields):
    return WasteSighting(
        kind=kind,
        job=fields.pop("one", job("17")),
        nodes=nodes,
        parts=(WastedPart(milli, 0),),
        held_milli=held,
        **fields,
    )


SERVICE = job(
    "9",
    service=ServiceTerms(replicas_min=1, replicas_max=2, sleep="/s", wake="/w"),
    replica=ReplicaPosition(service="chat", revision=1),
)


@pytest.mark.parametrize(
    ("seen", "command"),
    [
        (sighting(K.IDLE), "phalanx cancel 17"),
        (sighting(K.UNOCCUPIED, 250, 250), "phalanx cancel 17"),
        (sighting(K.IDLE, 2000, 8000), "phalanx submit --gpus 6 ..."),
        (sighting(K.IDLE, one=SERVICE), "phalanx sleep chat"),
        (
            sighting(K.IDLE, one=replace(SERVICE, spec=replace(SERVICE.spec, service=None))),
            "phalanx scale chat REPLICAS",
        ),
        (sighting(K.HUNG), "phalanx requeue 17"),
        (sighting(K.LOW), "phalanx submit --gpus 1/4 ..."),
        (sighting(K.LOW, 250, 250), "phalanx submit --gpus 1/8 ..."),
        (sighting(K.LOW, 8000, 8000), "phalanx submit --gpus 4 ..."),
        (sighting(K.DATA_BOUND, 2000, 2000), "phalanx submit --cpus 16 ..."),
        (sighting(K.DATA_BOUND, one=job("17", cpus=12)), "phalanx submit --cpus 24 ..."),
        (sighting(K.LOW, 8000, 8000, one=job("17", gpus="h100,a100:8")), "phalanx submit --gpus h100,a100:4 ..."),
        (sighting(K.LOW, one=job("17", gpus="h100:1")), "phalanx submit --gpus h100:1/4 ..."),
        (sighting(K.IDLE, 2000, 8000, one=job("17", gpus="h100:8")), "phalanx submit --gpus h100:6 ..."),
        (sighting(K.COMMUNICATING, 4000, 4000, ("a", "b", "c", "d"), node_gpus=4), "phalanx submit --within node ..."),
        (sighting(K.COMMUNICATING, 4000, 4000, ("a", "b", "c", "d"), node_gpus=3), "phalanx submit --within leaf ..."),
        (sighting(K.COMMUNICATING, 8000, 8000, ("a", "b")), "phalanx submit --within leaf ..."),
        (sighting(K.COMMUNICATING, 8000, 8000), "phalanx plan MODEL"),
        (sighting(K.CRASH_LOOP), "phalanx cancel 17"),
        (sighting(K.CRASH_LOOP, one=SERVICE), "phalanx logs 9"),
        (sighting(K.BROKEN, one=None, down=True), "phalanx nodes forget n0"),
        (sighting(K.BROKEN, one=None, cordoned=True), "phalanx nodes undrain n0"),
        (sighting(K.BROKEN, one=None), "phalanx nodes drain n0"),
        (sighting(K.FRAGMENTED, one=None, holders=("3", "4")), "phalanx requeue 3"),
        (sighting(K.FRAGMENTED, one=None), "phalanx nodes show n0"),
    ],
)
def test_each_waste_has_a_command_that_mends_it(seen, command):
    assert render_hint(remedy(seen)) == command
    assert ADVICE[seen.kind]


def test_queues_inherit_policies_and_thresholds():
    policy = IdlePolicy(action=IdleAction.STOP, after_s=3600.0)
    queues = {
        one.id: one
        for one in (
            queue("top", idle=policy, alarms=((K.IDLE, 60.0),)),
            queue("mid", parent="top", alarms=((K.LOW, None),)),
            queue("leaf", parent="mid", idle=IdlePolicy(action=IdleAction.OFF, after_s=0.0)),
            queue("other"),
        )
    }
    assert [idle_policy(queues, name) for name in ("top", "mid", "leaf", "other")] == [policy, policy, None, None]
    assert alarm_after_s(queues, "mid", K.IDLE) == 60.0
    assert alarm_after_s(queues, "leaf", K.LOW) is None
    assert alarm_after_s(queues, "other", K.IDLE) == ALARM_AFTER_S[K.IDLE]


@pytest.mark.parametrize(
    ("grace_s", "warned_s"), [(None, 3300.0), (60.0, 3540.0), (0.0, 3600.0)], ids=["default", "given", "none"]
)
def test_the_warning_comes_a_grace_before_the_end_of_the_time(grace_s, warned_s):
    assert IdlePolicy(action=IdleAction.RELEASE, after_s=3600.0, grace_s=grace_s).warn_after_s == warned_s
    assert IdlePolicy(action=IdleAction.WARN, after_s=3600.0, grace_s=grace_s).warn_after_s == 3600.0


@pytest.mark.parametrize(
    ("exempt", "labels", "found"),
    [
        ("", {"a": "b"}, False),
        ("keep", {"keep": "x"}, True),
        ("keep=yes", {"keep": "no"}, False),
        ("keep=yes", {"keep": "yes"}, True),
        ("keep", {}, False),
    ],
)
def test_a_label_exempts_a_job(exempt, labels, found):
    assert IdlePolicy(action=IdleAction.STOP, after_s=60.0, exempt=exempt).exempts(labels) is found


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"idle": IdlePolicy(action=IdleAction.STOP, after_s=1.0)}, "after is 1 seconds"),
        ({"idle": IdlePolicy(action=IdleAction.STOP, after_s=60.0, grace_s=60.0)}, "grace is 1m"),
        ({"idle": IdlePolicy(action=IdleAction.STOP, after_s=60.0, states=())}, "states: none"),
        ({"idle": IdlePolicy(action=IdleAction.STOP, after_s=60.0, states=(K.DATA_BOUND,))}, "states: data_bound"),
        ({"alarms": ((K.BROKEN, 5.0),)}, "broken is no waste of jobs"),
        ({"alarms": ((K.IDLE, -5.0),)}, "alarms: idle is -5 seconds"),
    ],
)
def test_policies_that_contradict_themselves_are_refused(fields, why):
    with pytest.raises(BadRequest, match=why):
        check_queue_tree({"q": queue("q", **fields)})
