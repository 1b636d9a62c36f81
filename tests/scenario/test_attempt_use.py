"""Means and peaks of what an attempt used: over gaps in the samples, restarts in place and a restart of the head."""

from dataclasses import replace

import pytest

from phalanx.controller.usage.attempt_use_tracker import STORE_EVERY_MS, AttemptUseTracker
from phalanx.core.ids import Epoch, Generation, JobId, NodeId, SupervisorId
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.share import DeviceShare, ShareKind
from phalanx.wire.supervisor import DeviceSample, JobSample, SamplesRequest
from tests.builders import job, placed

GIB = 1 << 30
JOB, N0 = JobId("1"), NodeId("n0")


class Sampled:
    """A tracker with the attempts that live now, fed once a second."""

    def __init__(self, stored=lambda _: None, *, share=None):
        grant = NodeGrant(
            node_id=N0,
            node_rank=0,
            cpus=0,
            memory_bytes=0,
            devices=(0,) if share else (0, 1),
            first_rank=0,
            tasks=1,
            share=share,
        )
        attempt = placed(job(JOB, gpus=2), "n0:0,1").attempt
        self.attempt = replace(attempt, job_id=JOB, epoch=Epoch(1), allocation=Allocation(grants=(grant,)))
        self.live = {JOB: self.attempt}
        self.tracker = AttemptUseTracker(self.live.get, stored)
        self.now_ms = 1_000_000

    def sample(self, *utilizations, after_ms=1000, cpu_s=0.0, memory=GIB, generation=0, epoch=1):
        self.now_ms += after_ms
        devices = [
            DeviceSample(index=index, uuid=f"G{index}", counter="nvml_gpu", utilization=each, job_id=JOB,
                         memory_used_bytes=(index + 1) * GIB, memory_total_bytes=80 * GIB)
            for index, each in enumerate(utilizations)
        ]  # fmt: skip
        one = JobSample(job_id=JOB, epoch=Epoch(epoch), generation=Generation(generation), cpu_s=cpu_s,
                        memory_peak_bytes=memory)  # fmt: skip
        request = SamplesRequest(
            supervisor_id=SupervisorId("s"), node_id=N0, at_s=self.now_ms / 1000, devices=devices, jobs=[one]
        )
        self.tracker.add_samples(request, self.now_ms)

    def found(self):
        return self.tracker.find(JOB, Epoch(1))


def test_the_mean_is_weighted_by_time_and_the_peak_is_the_highest():
    one = Sampled()
    one.sample(0.9, 0.0)
    one.sample(0.2, 0.0)
    one.sample(0.6, 0.0, after_ms=3000)
    busy, still = one.found().devices
    assert (busy.mean, busy.peak, busy.observed_ms) == (pytest.approx(0.5), 0.9, 4000), (
        "the first sample covers no time"
    )
    assert (still.mean, still.peak, still.memory_peak_bytes, still.memory_bytes) == (0.0, 0.0, 2 * GIB, 80 * GIB)


def test_a_silence_is_not_counted_as_observed():
    one = Sampled()
    one.sample(0.5, 0.5)
    one.sample(0.5, 0.5, after_ms=60_000)
    one.sample(0.5, 0.5)
    assert [each.observed_ms for each in one.found().devices] == [1000, 1000]
    assert one.found().nodes[0].observed_ms == 1000


def test_a_device_that_reports_no_utilization_has_no_mean():
    one = Sampled()
    one.sample(None, 0.5)
    one.sample(None, 0.5)
    silent, other = one.found().devices
    assert (silent.mean, silent.memory_peak_bytes, other.mean) == (None, GIB, pytest.approx(0.5))


def test_cpu_time_adds_up_over_restarts_in_place_and_late_samples_of_the_old_one_are_ignored():
    one = Sampled()
    one.sample(0.5, cpu_s=10.0, memory=3 * GIB)
    one.sample(0.5, cpu_s=2.0, memory=GIB, generation=1)
    one.sample(0.5, cpu_s=11.0, memory=9 * GIB)
    one.sample(0.5, cpu_s=4.0, memory=2 * GIB, generation=1)
    (node,) = one.found().nodes
    assert (node.cpu_s, node.memory_peak_bytes) == (14.0, 3 * GIB)


def test_a_shared_device_and_another_attempt_say_nothing_about_the_job():
    share = DeviceShare(kind=ShareKind.MPS, milli=250, memory_bytes=20 * GIB, group="mps:gpt")
    one = Sampled(share=share)
    one.sample(0.5)
    one.sample(0.5, epoch=2)
    assert one.found().devices == ()
    one.live.clear()
    before = one.found()
    one.sample(0.5)
    assert one.found() == before, "it holds nothing any more"


def test_records_are_stored_at_the_end_and_now_and_then_and_go_on_under_the_next_head():
    one = Sampled()
    one.sample(0.25, 0.75, cpu_s=5.0)
    one.sample(0.25, 0.75, cpu_s=6.0)
    assert one.tracker.to_store(one.now_ms, everything=False) == []
    (due,) = one.tracker.to_store(one.now_ms + STORE_EVERY_MS, everything=False)
    one.tracker.stored([due], one.now_ms)
    assert one.tracker.to_store(one.now_ms, everything=True) == [], "nothing changed since"
    later = Sampled(stored=lambda key: due if key == (JOB, 1) else None)
    later.sample(1.0, 0.75, cpu_s=7.0)
    later.sample(1.0, 0.75, cpu_s=8.0)
    found = later.found()
    assert [device.mean for device in found.devices] == [pytest.approx(0.625), pytest.approx(0.75)]
    assert found.nodes[0].cpu_s == 8.0
    later.live.clear()
    (ended,) = later.tracker.to_store(later.now_ms, everything=False)
    assert ended == found
    later.tracker.stored([ended], later.now_ms)
    assert later.found() is None


def test_an_attempt_that_ends_after_its_record_was_stored_takes_no_memory():
    one = Sampled()
    one.sample(0.5)
    due = one.tracker.to_store(one.now_ms + STORE_EVERY_MS, everything=False)
    one.tracker.stored(due, one.now_ms)
    assert one.found() == due[0], "it lives"
    one.live.clear()  # its node was silent since
    one.tracker.stored(one.tracker.to_store(one.now_ms, everything=False), one.now_ms)
    assert one.found() is None
