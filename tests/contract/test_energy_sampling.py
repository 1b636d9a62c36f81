"""The supervisor's sampler with NVML's probe on stand-in GPUs: what it sends of their energy, to a head that answers or does not."""

import importlib
import threading
from itertools import pairwise

import pytest

from phalanx.core.ids import JobId, NodeId, SupervisorId
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess, HeadUnavailable
from phalanx.node.probes import sampling
from phalanx.node.probes.nvml import open_nvml
from phalanx.node.probes.sampling import Sampler
from phalanx.wire import supervisor as wire
from phalanx.wire.rank import boottime_ns

PATIENCE_S = 20.0


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """The stand-in module, with two GPUs: the second has no counter."""
    module = importlib.import_module("tests.fake_nvml.pynvml")
    monkeypatch.setattr(module, "FOLDER", str(tmp_path))
    module.add_gpu(0, idle_mw=90_000)
    module.add_gpu(1, idle_mw=110_000, counter=False)
    return module


class Sending:
    """A sampler on its thread, and what the head got. `away`: the head does not answer."""

    def __init__(self, gpus, tmp_path, monkeypatch, *, indices_known=lambda: True):
        monkeypatch.setattr(sampling, "BUSY_S", 0.01)
        probe = open_nvml(gpus)
        assert probe is not None
        self.requests: list[wire.SamplesRequest] = []
        self.away = False
        self.news = threading.Condition()
        self.ended = threading.Event()
        self.sampler = Sampler(
            HeadAccess(address=HeadAddress("http://127.0.0.1:1", None), token="t"),
            probe,
            node_id=NodeId("n0"),
            supervisor_id=SupervisorId("s"),
            folder=str(tmp_path),
            job_by_device=lambda: {0: JobId("1")},
            tenants_by_device=dict,
            ended=self.ended,
            indices_known=indices_known,
        )
        monkeypatch.setattr(self.sampler._connection, "call", self.call)
        self.thread = threading.Thread(target=self.sampler.run, daemon=True)
        self.tries = 0

    def call(self, _method, _path, body, **_):
        with self.news:
            self.tries += 1
            self.news.notify_all()
            if self.away:
                raise HeadUnavailable("away")
            self.requests.append(wire.decode(body, wire.SamplesRequest))

    def wait(self, condition):
        with self.news:
            assert self.news.wait_for(condition, PATIENCE_S)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.sampler._wake.set()
        self.thread.join(PATIENCE_S)


def test_readings_of_begin_and_end_survive_a_head_that_is_away(gpus, tmp_path, monkeypatch):
    with Sending(gpus, tmp_path, monkeypatch) as sending:
        sending.wait(lambda: len(sending.requests) >= 2)
        sending.away = True
        begin_ns = boottime_ns()
        sending.sampler.fresh_samples(PATIENCE_S)
        gpus.set_power(0, 700_000)
        sending.sampler.fresh_samples(PATIENCE_S)
        end_ns = boottime_ns()
        tries = sending.tries
        sending.wait(lambda: sending.tries > tries + 1)
        count = len(sending.requests)
        sending.away = False
        sending.wait(lambda: len(sending.requests) > count + 1)
    late, after = sending.requests[count], sending.requests[count + 1]
    within = [one for one in late.energy if one.index == 0 and begin_ns <= one.at_ns <= end_ns]
    assert len(within) >= 2, "both readings came once the head answered"
    assert all(one.at_ns <= late.sent_ns for one in late.energy)
    assert all(one.at_ns > end_ns for one in after.energy), "and not again"
    for one in late.energy:
        if one.index == 0:
            # The counter was read a moment after the time that is noted, at 700 W at most.
            true_mj = gpus.energy_mj(0, one.at_ns)
            assert 0 <= one.millijoules - true_mj < 700_000
            assert one.meter == "GPU-00000000"


def test_readings_that_waited_come_in_several_requests_and_in_order(gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_READINGS_SENT_MAX", 3)
    with Sending(gpus, tmp_path, monkeypatch) as sending:
        sending.wait(lambda: sending.requests)
        sending.away = True
        times_ns = [boottime_ns()]
        for _ in range(4):
            sending.sampler.fresh_samples(PATIENCE_S)
            times_ns.append(boottime_ns())
        count = len(sending.requests)
        sending.away = False
        sending.wait(lambda: len(sending.requests) > count + 4)
    late = sending.requests[count:]
    assert max(len(request.energy) for request in late) <= 3 + 2, "the readings of now come with the last that waited"
    for index in (0, 1):
        sent_ns = [one.at_ns for request in sending.requests for one in request.energy if one.index == index]
        assert sent_ns == sorted(set(sent_ns))
        assert all(any(begin <= at <= end for at in sent_ns) for begin, end in pairwise(times_ns))


def test_device_without_a_counter_says_so(gpus, tmp_path, monkeypatch):
    with Sending(gpus, tmp_path, monkeypatch) as sending:
        sending.wait(lambda: len(sending.requests) >= 4)
    first, last = (next(one for one in sending.requests[at].energy if one.index == 1) for at in (0, -1))
    assert first.integrated
    assert last.integrated
    assert first.meter == last.meter
    assert last.millijoules == pytest.approx(110_000 * (last.at_ns - first.at_ns) / 1e9, abs=2)


def test_energy_waits_until_the_heads_index_of_a_device_is_known(gpus, tmp_path, monkeypatch):
    with Sending(gpus, tmp_path, monkeypatch, indices_known=lambda: False) as sending:
        sending.wait(lambda: len(sending.requests) >= 2)
    assert all(request.energy == [] for request in sending.requests)
    assert all(request.devices for request in sending.requests)


def test_the_end_of_an_attempt_does_not_wait_for_the_next_report(gpus, tmp_path, monkeypatch):
    with Sending(gpus, tmp_path, monkeypatch) as sending:
        monkeypatch.setattr(sending.sampler, "_pace", lambda: 3600.0)
        sending.sampler.fresh_samples(PATIENCE_S)
        count = len(sending.requests)
        sending.sampler.sample_now()
        sending.sampler.fresh_samples(PATIENCE_S)
        assert len(sending.requests) == count, "a begin waits"
        sending.sampler.sample_now(send=True)
        sending.wait(lambda: len(sending.requests) == count + 1)
        begin, end = (one for one in sending.requests[-1].energy[-4:] if one.index == 0)
        assert begin.at_ns < end.at_ns
