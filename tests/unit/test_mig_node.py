"""MIG on a node: what a driver reports, slices made and removed beside others, and a restart that finds its own."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from phalanx.core.errors import Conflict, NotFound, NotPermitted
from phalanx.core.fleet.mig import MigSlice, PlacementSource
from phalanx.core.ids import Epoch, Generation, JobId
from phalanx.core.work.share import DeviceShare, GrantedSlice, ShareKind
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic.events import MemberKey
from phalanx.node.mig.nvml_instances import NvmlInstances, open_nvml_instances
from phalanx.node.mig.slice_keeper import SliceKeeper
from phalanx.node.mig.virtual_instances import VirtualInstances
from phalanx.node.prepare.member_slices import hold_slices, slices_of_member
from phalanx.node.probes.devices import DeviceFacts
from phalanx.planner.facts.mig import find_mig_gpu
from tests.builders import allocation
from tests.mig_nvml import FakeGpu, FakeNvml

ENTRY = find_mig_gpu("h100")
assert ENTRY is not None
H100 = ENTRY.profiles


def facts(uuid="GPU-0"):
    return DeviceFacts(index=0, uuid=uuid, model="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, pci_bus="")


def keeper_on(gpu, folder, boot="boot-1"):
    return SliceKeeper(NvmlInstances(FakeNvml(gpu)), str(folder), boot)


# ---------------------------------------------------------------------------------------------------- what is reported


def test_the_driver_reports_profiles_places_and_slices():
    gpu = FakeGpu("GPU-0")
    gpu.add("3g.40gb", 4)
    found = NvmlInstances(FakeNvml(gpu)).describe("GPU-0")
    assert found is not None
    assert (found.on, found.source, found.closed_reason) == (True, PlacementSource.DRIVER, "")
    assert found.profiles == H100
    assert found.slices == (MigSlice(profile="3g.40gb", start=4, memory_slices=4, uuid="MIG-GPU-0-1"),)


def test_without_privilege_the_places_come_from_the_table():
    found = NvmlInstances(FakeNvml(FakeGpu("GPU-0", privileged=False))).describe("GPU-0")
    assert found is not None
    assert (found.profiles, found.source) == (H100, PlacementSource.TABLE)
    assert "no permission" in found.closed_reason


def test_an_old_driver_without_names_gets_them_from_the_table():
    found = NvmlInstances(FakeNvml(FakeGpu("GPU-0", names=False))).describe("GPU-0")
    assert found is not None
    assert found.profiles == H100


def test_nothing_is_invented_where_driver_and_table_are_silent():
    class Unknown(FakeGpu):
        profiles = H100

    hidden = NvmlInstances(FakeNvml(Unknown("GPU-0", model="NVIDIA H200", privileged=False))).describe("GPU-0")
    assert hidden is not None
    assert hidden.profiles == ()
    assert open_nvml_instances(FakeNvml(FakeGpu("GPU-0", model="Tesla T4"))) is None
    assert NvmlInstances(FakeNvml(FakeGpu("GPU-0", model="Tesla T4"))).describe("GPU-0") is None
    assert NvmlInstances(FakeNvml()).describe("GPU-0") is None


@pytest.mark.parametrize(("mode", "said"), [((0, 0), "MIG mode is off"), ((0, 1), "after the next reset")])
def test_mig_mode_that_is_off_is_reported_and_stays_off(mode, said):
    gpu = FakeGpu("GPU-0", mode=mode)
    instances = NvmlInstances(FakeNvml(gpu))
    found = instances.describe("GPU-0")
    assert found is not None
    assert (found.on, found.profiles) == (False, H100)
    assert said in found.closed_reason
    with pytest.raises(Conflict, match=said) as caught:
        instances.make("GPU-0", "1g.10gb", 0)
    assert "an operator" in caught.value.hint
    assert gpu.mode == mode


# ------------------------------------------------------------------------------------------------------ made and removed


def test_a_slice_is_made_where_it_was_asked_for_while_a_neighbour_runs():
    gpu = FakeGpu("GPU-0")
    neighbour = gpu.add("3g.40gb", 0, pids=[4711])
    made = NvmlInstances(FakeNvml(gpu)).make("GPU-0", "1g.20gb", 6)
    assert made.slice == MigSlice(profile="1g.20gb", start=6, memory_slices=2, uuid="MIG-GPU-0-2")
    assert gpu.places() == [("1g.20gb", 6), ("3g.40gb", 0)]
    assert gpu.instances[1].compute == 7  # all 26 processors of the instance, not the 16 of one slice
    assert neighbour.pids == [4711]


@pytest.mark.parametrize(
    ("profile", "start", "error", "said"),
    [
        ("1g.10gb", 1, Conflict, "in use"),
        ("1g.10gb", 7, NotFound, "no profile 1g.10gb that starts at memory slice 7"),
        ("9g.90gb", 0, NotFound, "no profile 9g.90gb"),
        ("1g.10gb+me", 4, Conflict, "media extension"),
    ],
)
def test_a_place_that_is_taken_or_does_not_exist_is_refused(profile, start, error, said):
    gpu = FakeGpu("GPU-0")
    gpu.add("2g.20gb", 0)
    gpu.add("1g.10gb+me", 6)
    with pytest.raises(error, match=said.replace("+", r"\+")):
        NvmlInstances(FakeNvml(gpu)).make("GPU-0", profile, start)
    assert len(gpu.instances) == 2


@pytest.mark.parametrize(
    ("call", "code", "error", "said"),
    [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_IN_USE, Conflict, "another program"),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_NO_PERMISSION, NotPermitted, "no permission"),
        ("nvmlGpuInstanceCreateComputeInstance", pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, Conflict, "in use"),
        ("nvmlGpuInstanceCreateComputeInstance", pynvml.NVML_ERROR_UNKNOWN, Conflict, "cannot make a 1g.10gb"),
    ],
)
def test_a_slice_that_fails_half_way_is_taken_away_again(tmp_path, call, code, error, said):
    gpu = FakeGpu("GPU-0", broken={call: code})
    keeper = keeper_on(gpu, tmp_path)
    with pytest.raises(error, match=said):
        keeper.make(facts(), "1g.10gb", 6, "job 7")
    assert (gpu.instances, keeper.own()) == ([], ())


def test_what_cannot_be_taken_away_is_named_and_removed_at_the_next_start(tmp_path):
    stuck = dict.fromkeys(("nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceDestroy"), pynvml.NVML_ERROR_UNKNOWN)
    gpu = FakeGpu("GPU-0", broken=stuck)
    with pytest.raises(Conflict, match=r"made in part .* and stays"):
        keeper_on(gpu, tmp_path).make(facts(), "1g.10gb", 6, "job 7")
    assert gpu.places() == [("1g.10gb", 6)]
    gpu.broken.clear()
    assert len(keeper_on(gpu, tmp_path).recover([facts()]).removed) == 1
    assert gpu.instances == []


def test_a_slice_in_use_is_not_removed_and_the_reason_says_by_whom(tmp_path):
    gpu = FakeGpu("GPU-0")
    keeper = keeper_on(gpu, tmp_path)
    made = keeper.make(facts(), "1g.10gb", 6, "job 7")
    gpu.instances[0].pids = [42, 43]
    with pytest.raises(Conflict, match="in use by processes 42, 43"):
        keeper.remove(made.uuid)
    gpu.broken["nvmlComputeInstanceDestroy"] = pynvml.NVML_ERROR_IN_USE  # one that came after the look
    gpu.instances[0].pids = []
    with pytest.raises(Conflict, match="another program uses it"):
        keeper.remove(made.uuid)
    assert keeper.own() == (made,)
    gpu.broken.clear()
    keeper.remove(made.uuid)
    assert (gpu.instances, keeper.own()) == ([], ())
    with pytest.raises(NotFound, match="not made by this supervisor"):
        keeper.remove(made.uuid)


def test_an_instance_that_has_the_id_by_now_is_left_alone():
    gpu = FakeGpu("GPU-0")
    instances = NvmlInstances(FakeNvml(gpu))
    made = instances.make("GPU-0", "1g.10gb", 6)
    gpu.instances.clear()
    instances.remove(made)
    gpu.add("3g.40gb", 0)
    instances.remove(made)
    assert gpu.places() == [("3g.40gb", 0)]


# --------------------------------------------------------------------------------------------------------- restarts


@pytest.fixture(params=["nvml", "virtual"])
def start(request, tmp_path):
    """Starts a supervisor's keeper on the same device, as often as called."""
    gpu = FakeGpu("GPU-0")

    def begin(boot="boot-1"):
        if request.param == "nvml":
            return keeper_on(gpu, tmp_path, boot), gpu.places
        instances = VirtualInstances(str(tmp_path), boot, [H100])
        key = instances.key(facts())
        return SliceKeeper(instances, str(tmp_path), boot), lambda: [
            (one.slice.profile, one.slice.start) for one in instances.find(key)
        ]

    return begin


def test_a_restart_keeps_what_goes_on_and_removes_what_is_left_over(start):
    keeper, places = start()
    first = keeper.make(facts(), "1g.10gb", 6, "job 7")
    second = keeper.make(facts(), "2g.20gb", 4, "job 8")
    again, places = start()
    found = again.recover([facts()], keep=lambda owner: owner == "job 8")
    assert (found.kept, found.removed, found.stuck) == ((second,), (first,), ())
    assert (places(), again.own()) == ([("2g.20gb", 4)], (second,))
    again.remove(second.uuid)
    assert places() == []


def test_a_restart_leaves_the_slices_of_others_alone_and_reports_them(tmp_path):
    gpu = FakeGpu("GPU-0")
    gpu.add("3g.40gb", 0)
    gpu.add("1g.10gb", 5, whole=False)
    keeper_on(gpu, tmp_path).make(facts(), "1g.10gb", 6, "job 7")
    again = keeper_on(gpu, tmp_path)
    described = again.describe(facts())
    assert described is not None
    assert [(one.profile, one.start, one.uuid) for one in described.slices] == [
        ("3g.40gb", 0, "MIG-GPU-0-1"),
        ("1g.10gb", 5, ""),
    ]
    assert len(again.recover([facts()]).removed) == 1
    assert gpu.places() == [("1g.10gb", 5), ("3g.40gb", 0)]


def test_a_supervisor_that_died_while_it_made_a_slice_finds_it(start, monkeypatch):
    keeper, _ = start()
    make = keeper._instances.make

    def dies(*where):
        make(*where)
        raise KeyboardInterrupt

    monkeypatch.setattr(keeper._instances, "make", dies)
    with pytest.raises(KeyboardInterrupt):
        keeper.make(facts(), "1g.10gb", 6, "job 7")
    again, places = start()
    assert places() == [("1g.10gb", 6)]
    assert len(again.recover([facts()], keep=lambda _: True).removed) == 1
    assert (places(), again.own()) == ([], ())


def test_slices_of_another_boot_or_in_a_damaged_record_are_not_its_own(tmp_path):
    gpu = FakeGpu("GPU-0")
    keeper_on(gpu, tmp_path).make(facts(), "1g.10gb", 6, "job 7")
    assert keeper_on(gpu, tmp_path, "boot-2").own() == ()  # an operator made the same one since
    (tmp_path / "slices.json").write_text("{")
    again = keeper_on(gpu, tmp_path)
    assert again.recover([facts()]).removed == ()
    assert gpu.places() == [("1g.10gb", 6)]


def test_a_leftover_slice_that_is_used_stays_on_record(tmp_path):
    gpu = FakeGpu("GPU-0")
    made = keeper_on(gpu, tmp_path).make(facts(), "1g.10gb", 6, "job 7")
    gpu.instances[0].pids = [42]
    found = keeper_on(gpu, tmp_path).recover([facts()])
    assert [(one, "processes 42" in why) for one, why in found.stuck] == [(made, True)]
    gpu.instances[0].pids = []
    assert keeper_on(gpu, tmp_path).recover([facts()]).removed == (made,)


def test_virtual_slices_obey_the_geometry_and_end_with_the_boot(tmp_path):
    instances = VirtualInstances(str(tmp_path), "boot-1", [H100, H100])
    made = instances.make("virtual-1", "4g.40gb", 0)
    for profile, start, error in (("3g.40gb", 0, Conflict), ("4g.40gb", 4, NotFound), ("1g.5gb", 4, NotFound)):
        with pytest.raises(error):
            instances.make("virtual-1", profile, start)
    described = instances.describe("virtual-1")
    assert described is not None
    assert described.slices == (made.slice,)
    assert instances.key(replace(facts("VIRTUAL-x"), index=1)) == "virtual-1"
    assert instances.describe("virtual-2") is None
    assert VirtualInstances(str(tmp_path), "boot-1", [H100, H100]).find("virtual-1") == (made,)
    assert VirtualInstances(str(tmp_path), "boot-2", [H100, H100]).find("virtual-1") == ()


# ----------------------------------------------------------------------------------------------------- slices of a member


def granted(*starts, profile="1g.10gb"):
    return [
        (facts(), GrantedSlice(device=0, profile=profile, start=start, memory_slices=1, milli=125)) for start in starts
    ]


def test_a_members_slices_exist_while_it_runs(tmp_path):
    gpu = FakeGpu("GPU-0")
    gpu.add("3g.40gb", 0)
    keeper = keeper_on(gpu, tmp_path)
    with slices_of_member(keeper, granted(6, 5), "7.1.0") as names:
        assert [one.uuid for one in keeper.own()] == list(names)
        assert gpu.places() == [("1g.10gb", 5), ("1g.10gb", 6), ("3g.40gb", 0)]
    assert (gpu.places(), keeper.own()) == ([("3g.40gb", 0)], ())


def test_if_one_slice_cannot_be_made_none_is_left(tmp_path):
    gpu = FakeGpu("GPU-0")
    gpu.add("1g.10gb", 5)
    keeper = keeper_on(gpu, tmp_path)
    with pytest.raises(Conflict), slices_of_member(keeper, granted(6, 5), "7.1.0"):
        pass
    assert (gpu.places(), keeper.own()) == ([("1g.10gb", 5)], ())


def test_a_slice_in_use_is_tried_again_and_gives_way_to_the_next_of_its_place(tmp_path):
    gpu = FakeGpu("GPU-0")
    keeper = keeper_on(gpu, tmp_path)
    waits: list[float] = []
    with slices_of_member(keeper, granted(6), "7.1.0", sleep=waits.append) as first:
        gpu.instances[0].pids = [42]
    assert len(waits) > 1
    assert [one.uuid for one in keeper.own()] == list(first)
    waits.clear()
    with (
        pytest.raises(Conflict, match="in use by processes 42"),
        slices_of_member(keeper, granted(6), "8.1.0", sleep=waits.append),
    ):
        pass
    assert len(waits) > 1
    gpu.instances[0].pids = []
    with slices_of_member(keeper, granted(6), "8.1.0"):
        assert [one.owner for one in keeper.own()] == ["8.1.0"]
        with (
            pytest.raises(Conflict, match="already"),
            slices_of_member(keeper, granted(6), "9.1.0", sleep=waits.append),
        ):
            pass
    assert gpu.instances == []


def test_a_slice_waits_for_the_one_of_a_member_that_has_to_go(tmp_path):
    # After a freeze, the head may grant a place again before this node hears that the attempt there has ended.
    gpu = FakeGpu("GPU-0")
    keeper = keeper_on(gpu, tmp_path)
    waits: list[float] = []
    with contextlib.ExitStack() as frozen:
        frozen.enter_context(slices_of_member(keeper, granted(6), "7.1.0"))

        def superseded_at_the_third_wait(seconds):
            waits.append(seconds)
            if len(waits) == 3:
                frozen.close()

        with slices_of_member(keeper, granted(6), "8.1.0", sleep=superseded_at_the_third_wait):
            assert [one.owner for one in keeper.own()] == ["8.1.0"]
            assert len(waits) == 3
    assert gpu.instances == []


def test_a_slice_that_cannot_be_made_is_a_fault_of_the_node_and_uncharged(tmp_path):
    gpu = FakeGpu("GPU-0")
    gpu.add("1g.10gb", 6)
    share = DeviceShare(milli=125, memory_bytes=1, kind=ShareKind.MIG, group="mig", slices=(granted(6)[0][1],))
    allocated = allocation("n0:0", tasks=1)
    grant = replace(allocated.grants[0], share=share)
    member: Any = SimpleNamespace(
        grant=grant, key=MemberKey(JobId("7"), Epoch(1), Generation(0)), cleanup=contextlib.ExitStack(), slices=()
    )
    for keeper, said in (
        (None, "can be divided by MIG"),
        (keeper_on(gpu, tmp_path), "has a 1g.10gb at memory slice 6"),
    ):
        with pytest.raises(PreparationFailed, match=said) as failed:
            hold_slices(member, keeper, [facts()])
        assert (failed.value.charge, failed.value.node_fault) == (False, True)
    gpu.instances.clear()
    with member.cleanup:
        hold_slices(member, keeper_on(gpu, tmp_path), [facts()])
        assert gpu.places() == [("1g.10gb", 6)]
        assert member.slices[0].startswith("MIG-")
    assert gpu.places() == []
