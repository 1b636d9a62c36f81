"""How the load of services was, in the memory of the head."""

import pytest

from phalanx.controller.services import load_history
from phalanx.controller.services.load_history import LEVELS, LoadHistory
from phalanx.core.ids import ServiceId
from phalanx.core.work.services.log_histogram import class_of
from phalanx.core.work.services.service_load import ServiceLoad

WEB = ServiceId("web")
BEGIN_S = 1_800_000_000.0


def test_seconds_become_points_of_both_levels():
    history = LoadHistory()
    for second in range(601):
        load = ServiceLoad(
            in_flight=second % 10, waiting=2, arrived=3, tokens=50, first_tokens={class_of(0.2): 9, class_of(4.0): 1}
        )
        history.add(WEB, load, BEGIN_S + second, ready=2, wanted=3)
    step_s, fine = history.points(WEB, 3600.0)
    assert (step_s, len(fine), fine[0].begin_s, fine[-1].begin_s) == (10, 60, BEGIN_S, BEGIN_S + 590)
    assert fine[5].ttft_s == pytest.approx(0.2, rel=0.06), "9 of 10 streams"
    assert (fine[5].requests_per_s, fine[5].tokens_per_s) == (3.0, 50.0)
    assert (fine[5].in_flight, fine[5].waiting, fine[5].ready, fine[5].wanted) == (9, 2, 2, 3)
    step_s, coarse = history.points(WEB, 86_400.0)
    assert (step_s, [one.begin_s for one in coarse]) == (300, [BEGIN_S, BEGIN_S + 300])
    assert coarse[0].requests_per_s == 3.0


def test_silence_is_no_point():
    history = LoadHistory()
    for second in (0, 1, 100, 110):
        history.add(WEB, ServiceLoad(arrived=1), BEGIN_S + second, ready=1, wanted=1)
    assert [one.begin_s - BEGIN_S for one in history.points(WEB, 60.0)[1]] == [0, 100]
    assert history.points(ServiceId("other"), 60.0) == (10, [])
    history.forget(WEB)
    assert history.points(WEB, 60.0)[1] == []


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(load_history, "SERVICES_MAX", 2)
    history = LoadHistory()
    for second in range(0, 10 * (LEVELS[0][1] + 50), 10):
        history.add(WEB, ServiceLoad(), BEGIN_S + second, ready=1, wanted=1)
    assert len(history.points(WEB, 3600.0)[1]) == LEVELS[0][1]
    for name in ("a", "b"):
        history.add(ServiceId(name), ServiceLoad(), BEGIN_S, ready=1, wanted=1)
    assert history.points(WEB, 3600.0)[1] == [], "it was silent for longest"
