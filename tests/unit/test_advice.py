"""The table of checks at, below and above each threshold; options that the command line reads; and no advice that contradicts itself."""

# mypy: disable-error-code="arg-type, list-item, var-annotated, dict-item"

import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.jobs.run import run
from phalanx.core.accounting.advice import gpu_checks, host_checks
from phalanx.core.accounting.advice.evidence import (
    DeviceEvidence,
    GpuKind,
    JobEvidence,
    NodeEvidence,
    SaveEvidence,
    Topic,
)
from phalanx.core.accounting.advice.judged_time import JUDGED_MIN_S
from phalanx.core.accounting.advice.settings import memory_setting, time_setting
from phalanx.core.accounting.advice.table import CHECKS, advise
from phalanx.core.fleet.mig import MigProfile
from phalanx.core.ids import JobId
from phalanx.core.units import GIB, parse_duration_s, parse_memory_bytes
from phalanx.core.work.gpus import parse_gpus
from phalanx.web.command_hints import option_text

HOUR = 3600.0
SLICE = MigProfile(
    name="1g.10gb", id=19, compute_slices=1, memory_slices=1, memory_bytes=10 * GIB, starts=(0, 1), max_instances=7
)


def device(mean=0.9, memory_gib=60.0, *, size_gib=80):
    peak = None if memory_gib is None else int(memory_gib * GIB)
    return DeviceEvidence(mean=mean, peak=1.0, memory_peak_bytes=peak, memory_bytes=size_gib * GIB)


def node(*devices, busy=None, host_gib=None, cpus=128, memory_gib=1024, gpus=8):
    host = None if host_gib is None else int(host_gib * GIB)
    return NodeEvidence(
        devices=devices,
        busy_cpus=busy,
        memory_peak_bytes=host,
        cpus=cpus,
        memory_bytes=memory_gib * GIB,
        gpus=gpus,
    )


def ran(gpus, *nodes, hours=4.0, states=None, **more):
    """A job that ran some hours on these nodes and succeeded; computing all the time unless `states` has shares."""
    held = hours * HOUR * sum(len(each.devices) for each in nodes)
    shares = {"computing": 1.0} if states is None else states
    return JobEvidence(
        job_id=JobId("17"),
        run_s=hours * HOUR,
        held_s=hours * HOUR + 20,
        gpus=parse_gpus(gpus),
        nodes=nodes,
        succeeded=True,
        by_state={state: share * held for state, share in shares.items() if held},
        **more,
    )


def small(mean=0.1, memory_gib=8.0, gpus="1", **more):
    return ran(gpus, node(device(mean, memory_gib), busy=2.0, host_gib=6), **more)


def spread(*, count=4, each=1, busy=3.0, **more):
    return ran(f"{count}x{each}", *[node(*[device()] * each, busy=busy, host_gib=12)] * count, **more)


def cpu_job(busy, *, cpus=8, nodes=1, host_gib=4.0, **more):
    return ran("0", *[node(busy=busy, host_gib=host_gib)] * nodes, cpus=cpus, **more)


def data_bound(share, **more):
    return ran(
        "1", node(device(0.3), busy=3.9, host_gib=8), states={"data_bound": share, "computing": 1 - share}, **more
    )


def saves(count, *, interval_s, wanted_s=600.0, stall_s=1.0, trained_s=4 * HOUR):
    found = SaveEvidence(
        count=count, interval_s=interval_s, wanted_s=wanted_s, stall_s=stall_s, step_s=2.0, trained_s=trained_s
    )
    return ran("1", node(device()), saves=found)


# What ran, what is advised, and exactly what to write; "" for no advice. Threshold by threshold: beyond it, at it, and short of it.
CASES = [
    # GPUs that were not used: below 2 % on average
    ("one idle GPU", small(0.0), "unused_gpus", "--gpus 0"),
    ("one GPU just below the threshold", small(0.0199), "unused_gpus", "--gpus 0"),
    ("one GPU at the threshold", small(0.02), "fits_quarter", "--gpus 1/4"),
    ("three of four idle", ran("h100:4", node(device(), *[device(0.001)] * 3)), "unused_gpus", "--gpus h100:1"),
    ("one of four idle", ran("1x4", node(*[device()] * 3, device(0.0))), "unused_gpus", "--gpus 1x3"),
    (
        "one of four nodes idle",
        ran("4x1", *[node(device())] * 3, node(device(0.0)), cpus=4, memory_bytes=16 * GIB),
        "unused_gpus",
        "--gpus 1x3 --cpus 12 --memory 48GiB",
    ),
    ("idle, in either of two shapes", ran("h100:2|a100:4", node(device(0.0), device(0.0))), "unused_gpus", "--gpus 0"),
    # Few GPUs on each of many nodes
    ("one GPU on each of four nodes", spread(), "spread_over_nodes", "--gpus 1x4"),
    ("the same with CPUs", spread(cpus=4), "spread_over_nodes", "--gpus 1x4 --cpus 16"),
    (
        "the same with memory and tasks",
        spread(memory_bytes=24 * GIB, tasks_per_node=2, tasks_fixed=True),
        "spread_over_nodes",
        "--gpus 1x4 --memory 58GiB --tasks-per-node 8",
    ),
    ("four GPUs on each of two nodes", spread(count=2, each=4), "spread_over_nodes", "--gpus 1x8"),
    ("twelve GPUs on six nodes", spread(count=6, each=2), "spread_over_nodes", "--gpus 2x6"),
    ("all GPUs of each node", spread(count=2, each=8), "", ""),
    ("more CPUs than one node has", spread(cpus=33, busy=30.0), "", ""),
    ("just as many CPUs", spread(cpus=32), "spread_over_nodes", "--gpus 1x4 --cpus 128"),
    ("an elastic job", replace(spread(), gpus=parse_gpus("2..4x1")), "", ""),
    (
        "communicating over nodes where one has room",
        spread(states={"communicating": 0.5, "computing": 0.5}),
        "spread_over_nodes",
        "--gpus 1x4",
    ),
    # Waits for data for half of the time
    ("at the share", data_bound(0.5), "waits_for_data", "DataLoader(num_workers=16, prefetch_factor=4)"),
    ("short of it", data_bound(0.4999), "", ""),
    ("with all its CPUs busy", data_bound(0.8, cpus=4), "waits_for_data", "--cpus 8"),
    ("with 80 % of its CPUs busy", replace(data_bound(0.8, cpus=4), nodes=(node(device(0.3), busy=3.2),)), "waits_for_data", "--cpus 8"),
    (
        "with CPUs left",
        replace(data_bound(0.8, cpus=4), nodes=(node(device(0.3), busy=3.19),)),
        "waits_for_data",
        "DataLoader(num_workers=4, prefetch_factor=4)",
    ),
    # A part of a GPU: up to 15 %, and memory with a margin
    ("at 15 %", small(0.15), "fits_quarter", "--gpus 1/4"),
    ("above 15 %", small(0.1501), "", ""),
    ("a quarter of the memory", small(0.1, 20 / 1.2), "fits_quarter", "--gpus 1/4"),
    ("more than a quarter", small(0.1, 16.7), "", ""),
    ("of a model", small(gpus="h100:1"), "fits_quarter", "--gpus h100:1/4"),
    ("a MIG slice instead", small(0.1, 8.0, mig=(("h100", SLICE),)), "fits_mig_slice", "--gpus h100.1g.10gb"),
    ("memory at the slice", small(0.1, 10 / 1.2, mig=(("h100", SLICE),)), "fits_mig_slice", "--gpus h100.1g.10gb"),
    ("above the slice", small(0.1, 8.4, mig=(("h100", SLICE),)), "fits_quarter", "--gpus 1/4"),
    ("busier than a seventh", small(0.145, 8.0, mig=(("h100", SLICE),)), "fits_quarter", "--gpus 1/4"),
    ("a lesser model", small(0.1, 30.0, lesser_kinds=(GpuKind(model="l40s", memory_bytes=48 * GIB),)), "too_powerful", "--gpus l40s:1"),
    ("of too little memory", small(0.1, 41.0, lesser_kinds=(GpuKind(model="l40s", memory_bytes=48 * GIB),)), "", ""),
    # Several GPUs, 25 % used
    ("eight at 25 %", ran("8", node(*[device(0.25, 9)] * 8)), "low_utilization", "--gpus 4"),
    ("above 25 %", ran("8", node(*[device(0.2501, 9)] * 8)), "", ""),
    ("eight at 5 %", ran("8", node(*[device(0.05, 9)] * 8)), "low_utilization", "--gpus 2"),
    ("four nodes at 10 %", ran("4x1", *[node(device(0.1, 9))] * 4), "low_utilization", "--gpus 1"),
    ("eight that wait for data", ran("8", node(*[device(0.1, 9)] * 8), states={"data_bound": 0.5, "low": 0.5}), "waits_for_data", "DataLoader(num_workers=128, prefetch_factor=4)"),
    ("nodes that wait for each other", ran("4x1", *[node(device(0.1, 9))] * 4, states={"communicating": 0.5, "low": 0.5}), "spread_over_nodes", "--gpus 1x4"),
    ("with memory for all", ran("8", node(*[device(0.05, 60)] * 8)), "", ""),
    # CPU jobs
    ("a node that did nothing", ran("0", node(busy=5.0), node(busy=0.009), cpus=8), "idle_nodes", "--nodes 1"),
    ("a node that did a little", ran("0", node(busy=5.0), node(busy=0.01), cpus=8), "low_cpu_use", "--cpus 6"),
    ("one core of eight", cpu_job(0.99), "serial_code", "--cpus 1"),
    ("at 85 % of one core", cpu_job(0.85), "serial_code", "--cpus 1"),
    ("less than 85 %", cpu_job(0.849), "low_cpu_use", "--cpus 2"),
    ("more than one core", cpu_job(1.11), "low_cpu_use", "--cpus 2"),
    ("at 60 % of the CPUs", cpu_job(4.8), "low_cpu_use", "--cpus 6"),
    ("above 60 %", cpu_job(4.81), "", ""),
    ("no fewer CPUs than tasks", cpu_job(1.5, tasks_per_node=8), "", ""),
    ("few CPUs on each of ten nodes", cpu_job(3.9, cpus=4, nodes=10), "spread_cpus", "--nodes 1 --cpus 40"),
    ("half of each node", cpu_job(60.0, cpus=64, nodes=2), "spread_cpus", "--nodes 1 --cpus 128"),
    ("more than half", cpu_job(60.0, cpus=65, nodes=2), "", ""),
    ("with memory for its nodes", cpu_job(3.9, cpus=4, nodes=2, host_gib=500), "", ""),
    # CPUs and memory beside GPUs: a GPU's part of the node is 16 CPUs and 128 GiB
    ("1.5 times its part", ran("1", node(device(), busy=2.0), cpus=24), "cpus_per_gpu", "--cpus 16"),
    ("less than that", ran("1", node(device(), busy=2.0), cpus=23), "", ""),
    ("busy at 80 %", ran("1", node(device(), busy=19.2), cpus=24), "", ""),
    ("busy at 79 %", ran("1", node(device(), busy=18.9), cpus=24), "cpus_per_gpu", "--cpus 23"),
    ("35 % of the memory", ran("1", node(device(), host_gib=35), memory_bytes=100 * GIB), "excess_memory", "--memory 42GiB"),
    ("above 35 %", ran("1", node(device(), host_gib=35.1), memory_bytes=100 * GIB), "", ""),
    ("more than its part, 79 % used", ran("1", node(device(), host_gib=102), memory_bytes=129 * GIB), "excess_memory", "--memory 123GiB"),
    ("its part exactly", ran("1", node(device(), host_gib=100), memory_bytes=128 * GIB), "", ""),
    ("more than its part, 80 % used", ran("1", node(device(), host_gib=104), memory_bytes=130 * GIB), "", ""),
    ("little unused", ran("1", node(device(), host_gib=0.4), memory_bytes=GIB), "", ""),
    ("more than one GiB unused", ran("1", node(device(), host_gib=0.5), memory_bytes=int(1.7 * GIB)), "excess_memory", "--memory 640MiB"),
    # A time limit ten times too long
    ("ten times", replace(ran("1", node(device())), held_s=HOUR, time_limit_s=10 * HOUR), "long_limit", "--time 90m"),
    ("less than ten times", replace(ran("1", node(device())), held_s=HOUR + 1, time_limit_s=10 * HOUR), "", ""),
    ("it failed", replace(ran("1", node(device())), held_s=HOUR, time_limit_s=99 * HOUR, succeeded=False), "", ""),
    # Checkpoints: a fourth of the optimum, or four times it
    ("too often", saves(90, interval_s=40, stall_s=2.0), "saves_too_often", "phalanx.torch.checkpoint(model, optimizer, every_steps=300)"),
    ("a fourth of the optimum", saves(90, interval_s=150, stall_s=5.0), "saves_too_often", "phalanx.torch.checkpoint(model, optimizer, every_steps=300)"),
    ("a little more", saves(90, interval_s=151, stall_s=5.0), "", ""),
    ("often, and cheap", saves(90, interval_s=50, stall_s=1.0), "", ""),
    ("at 2 % of the time", saves(90, interval_s=49, stall_s=1.0), "saves_too_often", "phalanx.torch.checkpoint(model, optimizer, every_steps=300)"),
    ("four times the optimum", saves(5, interval_s=2400), "saves_too_rarely", "phalanx.torch.checkpoint(model, optimizer, every_steps=300)"),
    ("a little less", saves(5, interval_s=2399), "", ""),
    ("only two", saves(2, interval_s=9000), "", ""),
    ("none in two hours", saves(0, interval_s=0, trained_s=7200), "saves_too_rarely", "phalanx.torch.checkpoint(model, optimizer)"),
    ("none in less", saves(0, interval_s=0, trained_s=7199), "", ""),
    # Good jobs
    ("a busy gang", ran("2x8", *[node(*[device()] * 8, busy=30.0, host_gib=400)] * 2, cpus=64, memory_bytes=500 * GIB), "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("what", "job", "check", "flag"), CASES, ids=[case[0] for case in CASES])
def test_a_check_speaks_from_its_threshold_on(what, job, check, flag):
    found = advise(job)
    assert [(one.check, option_text(one)) for one in found] == ([(check, flag)] if check else [])


def test_every_check_has_cases_that_it_speaks_in():
    assert {check for _, _, check, _ in CASES if check} == {row.judge.__name__ for row in CHECKS}


@pytest.mark.parametrize(("what", "job", "check", "flag"), CASES, ids=[case[0] for case in CASES])
def test_what_was_not_measured_is_unknown_and_not_zero(what, job, check, flag):
    blind = replace(
        job,
        nodes=tuple(
            replace(each, devices=(DeviceEvidence(),) * len(each.devices), busy_cpus=None, memory_peak_bytes=None)
            for each in job.nodes
        ),
        by_state={},
        saves=None,
    )
    assert {one.check for one in advise(blind)} <= {"spread_over_nodes", "long_limit"}, "these need records alone"


@pytest.mark.parametrize(("what", "job", "check", "flag"), CASES, ids=[case[0] for case in CASES])
def test_a_short_run_and_a_replica_get_no_advice(what, job, check, flag):
    assert advise(replace(job, run_s=JUDGED_MIN_S - 1)) == ()
    assert advise(replace(job, service=True)) == ()


def test_the_largest_saving_comes_first_and_names_its_hours():
    job = ran(
        "4", node(device(), *[device(0.0)] * 3, busy=2.0, host_gib=9), time_limit_s=400 * HOUR, memory_bytes=64 * GIB
    )
    first, second = advise(job)
    assert (first.check, second.check) == ("unused_gpus", "long_limit")
    assert first.gpu_hours == pytest.approx(12.0)
    assert "3 of 4 GPUs" in first.measured
    assert "4h00m" in second.measured


def test_a_gang_of_several_roles_gets_no_options_that_name_one():
    job = replace(spread(cpus=99, memory_bytes=900 * GIB), roles=2)
    assert advise(job) == ()
    assert [one.check for one in advise(replace(job, time_limit_s=400 * HOUR))] == ["long_limit"]


shares = st.one_of(st.none(), st.sampled_from([0.0, 0.01, 0.02, 0.1, 0.15, 0.25, 0.6, 1.0]))
devices = st.builds(device, shares, st.one_of(st.none(), st.sampled_from([0.5, 8.0, 19.0, 40.0, 79.0])))
nodes = st.builds(
    lambda found, busy, host: node(*found, busy=busy, host_gib=host),
    st.lists(devices, min_size=1, max_size=1),
    st.one_of(st.none(), st.sampled_from([0.0, 0.9, 3.0, 60.0])),
    st.one_of(st.none(), st.sampled_from([0.1, 3.0, 90.0])),
)
jobs = st.builds(
    lambda found, cpus, memory, limit, states, mig, gpus: replace(
        ran("1", *found, states=states, mig=mig, cpus=cpus, memory_bytes=memory * GIB, time_limit_s=limit),
        gpus=parse_gpus(gpus if len(found) > 1 else gpus.partition("x")[2]) if gpus else parse_gpus(str(len(found))),
    ),
    st.lists(nodes, min_size=1, max_size=4),
    st.sampled_from([0, 1, 8, 32, 100]),
    st.sampled_from([0, 1, 64, 512]),
    st.sampled_from([None, 5 * HOUR, 100 * HOUR]),
    st.sampled_from([{"computing": 1.0}, {"data_bound": 0.7, "idle": 0.3}, {"communicating": 0.6, "low": 0.4}, {}]),
    st.sampled_from([(), (("h100", SLICE),)]),
    st.sampled_from(["", "4xh100:1"]),
)


@given(jobs)
def test_advice_never_contradicts_itself_and_the_command_line_reads_every_option(job):
    found = advise(job)
    options = [word for one in found for word in shlex.split(option_text(one)) if word.startswith("--")]
    assert len(options) == len(set(options)), found
    for one in found:
        if option_text(one).startswith("--"):
            run.make_context("run", [*shlex.split(option_text(one)), "--", "true"])
        assert 0.0 <= one.gpu_hours <= job.gpu_s / HOUR + 1e-9
        assert "None" not in one.measured


def test_each_check_decides_something_and_those_of_a_part_wait_for_the_loader():
    assert all(row.decides for row in CHECKS)
    parts = {gpu_checks.fits_mig_slice, gpu_checks.fits_quarter, gpu_checks.too_powerful}
    assert {row.judge for row in CHECKS if Topic.LOADER in row.needs} == parts
    assert advise(replace(small(), by_state={"data_bound": 9.0, "low": 1.0}))[0].check == "waits_for_data"


@pytest.mark.parametrize("seconds", [600, 2999, 3000, 3001, 35_999, 36_000, 36_001, 400_000])
def test_a_time_limit_has_its_margin_and_little_more(seconds):
    limit_s = parse_duration_s(time_setting(seconds)[1])
    assert seconds * 1.2 <= limit_s <= seconds * 1.2 + 3600


@pytest.mark.parametrize("peak", [1, 100 << 20, GIB * 5 // 6, GIB, 77 * GIB + 1])
def test_a_memory_request_has_its_margin_and_little_more(peak):
    wanted = parse_memory_bytes(memory_setting(peak)[1])
    assert max(512 << 20, peak * 1.2) <= wanted <= peak * 1.2 + GIB


def test_thresholds_are_those_of_job_defense_shield_where_it_has_one():
    assert (gpu_checks.SMALL_MOST, gpu_checks.LOW_MOST, gpu_checks.LOW_TARGET) == (0.15, 0.25, 0.75)
    assert (host_checks.SERIAL_FROM, host_checks.LOW_CPU_MOST, host_checks.NODE_PART_MOST) == (0.85, 0.60, 0.5)
    assert (host_checks.MEMORY_MOST, host_checks.MEMORY_PER_GPU_MOST, host_checks.CPUS_PER_GPU_FROM) == (
        0.35,
        0.8,
        18 / 12,
    )
