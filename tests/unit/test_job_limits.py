"""What limits a job gets, and when the watch over memory ends one."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.failure import MemoryOveruse
from phalanx.core.work.share import DeviceShare, ShareKind
from phalanx.core.work.spec import JobSpec, Role
from phalanx.node.diagnosis.memory_watch import OVER_S, MemoryWatch
from phalanx.node.logic.events import MemberKey
from phalanx.node.probes.devices import DeviceReading
from phalanx.node.processes.attempt_limits import JobLimits, limits_of_job

GIB = 1 << 30
USE = MemoryOveruse(used_bytes=int(3.1 * GIB), asked_bytes=2 * GIB)


def limits(*, cpus=0, memory_bytes=0, devices=(), share=None, virtual=False):
    grant = NodeGrant(
        node_id=NodeId("a"), node_rank=0, devices=devices, cpus=0, memory_bytes=0, tasks=1, first_rank=0, share=share
    )
    role = Role(cpus=cpus, memory_bytes=memory_bytes)
    return limits_of_job(role, grant, virtual=virtual, node_cpus=64, node_devices=8)


def part(kind):
    return DeviceShare(milli=250, memory_bytes=GIB, kind=kind, group="g")


def test_a_job_that_asks_for_nothing_has_no_limit_and_counts_for_one_cpu():
    assert limits() == JobLimits(cpus=0, memory_bytes=0, share_cpus=1)


def test_a_job_counts_for_the_cpus_of_its_devices():
    assert limits(devices=(0, 1)) == JobLimits(cpus=0, memory_bytes=0, share_cpus=16)


def test_what_a_job_asks_for_is_its_limit_and_its_weight():
    assert limits(cpus=6, memory_bytes=GIB, devices=(0,)) == JobLimits(cpus=6, memory_bytes=GIB, share_cpus=6)


def test_a_share_by_mps_limits_a_virtual_device_and_not_a_real_one():
    assert limits(devices=(0,), share=part(ShareKind.MPS), virtual=True) == JobLimits(cpus=0.25, share_cpus=0.25)
    assert limits(devices=(0,), share=part(ShareKind.MPS)) == JobLimits(cpus=0, share_cpus=2)


def test_time_slices_have_a_weight_and_no_limit():
    assert limits(devices=(0,), share=part(ShareKind.TIME), virtual=True) == JobLimits(cpus=0, share_cpus=0.25)


@pytest.fixture
def watched():
    """A member whose use the test sets, a clock, what was reported, and the watch."""
    box = SimpleNamespace(now_s=0.0, use=None, events=[])
    processes = SimpleNamespace(
        containment=SimpleNamespace(limits=SimpleNamespace(measured=True)),
        memory_overuse=lambda _read: box.use,
        members=lambda _read: [10, 11],
    )
    member: Any = SimpleNamespace(
        key=MemberKey(JobId("1"), Epoch(1), Generation(0)),
        processes=processes,
        memory_overuse=None,
        prepare=SimpleNamespace(spec=JobSpec(name="job", role=Role(memory_bytes=2 * GIB), workdir="/work")),
        grant=SimpleNamespace(share=None, devices=(), role=0),
        start=None,
        pids={},
    )
    box.member, box.gpu = member, {}
    box.watch = MemoryWatch(
        lambda: [member], box.events.append, threading.Event(), devices=lambda: box.gpu, clock=lambda: box.now_s
    )
    return box


def test_a_node_of_another_role_has_the_limit_of_that_role(watched):
    spec = watched.member.prepare.spec
    watched.use = USE
    watched.member.prepare.spec = replace(spec, role=replace(spec.role, memory_bytes=0, others=(spec.role,)))
    for role, reported in ((0, 0), (1, 1)):
        watched.member.grant = SimpleNamespace(share=None, devices=(), role=role)
        for watched.now_s in (watched.now_s, watched.now_s + OVER_S, watched.now_s + 2 * OVER_S):
            watched.watch.check()
        assert len(watched.events) == reported


def test_a_short_peak_ends_no_job(watched):
    watched.use = USE
    watched.watch.check()
    watched.now_s, watched.use = 1.0, None
    watched.watch.check()
    watched.now_s, watched.use = OVER_S + 0.5, USE
    watched.watch.check()
    assert watched.events == []


def test_a_job_over_its_memory_for_two_seconds_is_reported_once(watched):
    watched.use = USE
    for watched.now_s in (0.0, 0.5, 1.9, 2.0, 2.5):
        watched.watch.check()
    assert [event.use for event in watched.events] == [USE]
    assert watched.member.memory_overuse == USE


def test_a_limit_that_the_kernel_enforced_is_reported_at_once(watched):
    watched.member.processes.containment.limits.measured = False
    watched.use = USE
    watched.watch.check()
    assert [event.use for event in watched.events] == [USE]


def reading(**process_bytes):
    return DeviceReading(
        index=3,
        uuid="GPU-3",
        utilization=None,
        counter="",
        memory_used_bytes=None,
        memory_total_bytes=80 * GIB,
        process_bytes={int(pid[1:]): used for pid, used in process_bytes.items()},
    )


def test_only_the_job_that_is_over_its_share_of_a_gpu_ends(watched):
    watched.member.grant = SimpleNamespace(
        share=replace(part(ShareKind.MPS), memory_bytes=20 * GIB), devices=(3,), role=0
    )
    watched.gpu = {3: reading(p10=12 * GIB, p11=7 * GIB, p99=60 * GIB)}
    for watched.now_s in (0.0, 3.0):
        watched.watch.check()
    assert watched.events == [], "the 60 GiB are a neighbour's"
    watched.gpu = {3: reading(p10=12 * GIB, p11=10 * GIB)}
    for watched.now_s in (4.0, 5.9):
        watched.watch.check()
    assert watched.events == []
    watched.now_s = 6.0
    watched.watch.check()
    (event,) = watched.events
    assert str(event.use) == "out of GPU memory: used 22 GiB of GPU 3, its share has 20 GiB"


def test_time_slices_and_a_driver_that_does_not_know_end_nobody(watched):
    watched.member.grant = SimpleNamespace(share=replace(part(ShareKind.TIME), memory_bytes=GIB), devices=(3,), role=0)
    watched.gpu = {3: reading(p10=12 * GIB)}
    for watched.now_s in (0.0, 3.0):
        watched.watch.check()
    watched.member.grant.share = replace(part(ShareKind.MPS), memory_bytes=GIB)
    watched.gpu = {3: reading(p10=(1 << 64) - 1)}
    for watched.now_s in (4.0, 8.0):
        watched.watch.check()
    assert watched.events == []
