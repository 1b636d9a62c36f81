"""Numbers that nothing can count with are refused by name: integers of hundreds of digits, and less than none of what a server has."""

from dataclasses import replace

import pytest

from phalanx.api.http.bodies import decode_body
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.mig import DeviceMig, MigSlice
from phalanx.core.ids import QueueId
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.queue_validation import check_queue_tree
from phalanx.planner.calibration.profile import Profile
from phalanx.planner.calibration.record_codec import decode_record
from tests.builders import make_node

HUGE = 10**400


@pytest.mark.parametrize("number", [HUGE, -HUGE, 2**63, -(2**63) - 1])
def test_body_has_no_integer_of_more_than_64_bits(number):
    with pytest.raises(BadRequest, match="an integer has more than 64 bits"):
        decode_body(b'{"a": [{"b": %d}]}' % number, dict)


def test_digits_in_a_text_and_integers_of_64_bits_are_let_through():
    held = {"a": str(HUGE), "b": 2**63 - 1, "c": -(2**63), "d": 0.12345678901234567890}
    text = b'{"a": "%d", "b": %d, "c": %d, "d": 0.12345678901234567890}' % (HUGE, 2**63 - 1, -(2**63))
    assert decode_body(text, dict) == held


@pytest.mark.parametrize("number", [HUGE, -HUGE, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["quota_gpus", "priority", "weight", "budget_gpu_h"])
def test_queue_of_a_number_beyond_all_bounds_is_refused_by_its_name(field, number):
    queue = replace(Queue(id=QueueId("q")), **{field: number})
    with pytest.raises(BadRequest, match="queue q: "):
        check_queue_tree({queue.id: queue})


def test_profile_of_a_number_beyond_all_bounds_is_refused():
    with pytest.raises(BadRequest, match="it must be a finite number"):
        decode_record(Profile, {"at": "2026-11-22", "at_s": HUGE, "nodes": [], "job": ""}, "profile")


@pytest.mark.parametrize("field", ["cpus", "memory_bytes", "probe_port"])
@pytest.mark.parametrize("count", [-1, HUGE])
def test_node_of_counts_that_can_be_none_is_miscounted(field, count):
    assert replace(make_node("n0"), **{field: count}).invalid_count().startswith(f"{field} is ")


def test_node_of_devices_that_can_be_none_is_miscounted():
    node = make_node("n0")
    assert node.invalid_count() == ""
    one = Device(index=0, uuid="u", model="h100", memory_bytes=1)
    assert replace(node, devices=(one, one)).invalid_count() == "two devices have the same index"
    assert replace(node, devices=(replace(one, memory_bytes=-1),)).invalid_count() == "devices[0].memory_bytes is -1"


@pytest.mark.parametrize(("start", "size"), [(-1, 1), (8, 1), (0, 9), (0, 0), (HUGE, HUGE)])
def test_node_of_slices_that_can_be_none_is_refused(start, size):
    mig = DeviceMig(on=True, slices=(MigSlice(profile="1g.10gb", start=start, memory_slices=size),))
    one = Device(index=0, uuid="u", model="h100", memory_bytes=1, mig=mig)
    assert replace(make_node("n0"), devices=(one,)).invalid_count().startswith("devices[0].mig has 1g.10gb on memory")
