"""From samples to a profile, and what is read off it: rates, slow parts, staleness, merging. Each test draws a small fleet."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

from dataclasses import replace

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.calibration.profile import (
    VALID_S,
    InterNodeMeasurement,
    NodeMeasurement,
    PairMeasurement,
    Profile,
    RunMeasurement,
    measured_rates,
    merge_profiles,
    parse_profile,
    slow_nodes,
    slow_parts,
    stale_reasons,
)
from phalanx.planner.calibration.record_codec import decode_record, encode_record
from phalanx.planner.calibration.samples import (
    CalibratedNode,
    Collective,
    CollectiveSample,
    CollectiveScope,
    CopySample,
    PairSample,
    ProductSample,
    Samples,
    WriteSample,
    build_profile,
    fit_alpha_beta,
    tournament_rounds,
)
from phalanx.planner.calibration.slowdown import CALIBRATION_STACK, measure_slowdown, predict_step_s
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.facts.coefficient_table import find_stack, physics
from phalanx.planner.facts.machines import build_machine

MODEL = ModelShape(name="gpt", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=100)
RUN = RunMeasurement(model=MODEL, layout=Layout(tensor=2, replicate=2), seq=128, step_s=0.5, nodes=2, gpus_per_node=2)


def samples(**more):
    return Samples(at="2026-11-21T15:00:00Z", at_s=1000.0, quick=True, **{"devices": (2, 2), **more})


def members(*names, gpu="h100"):
    return [CalibratedNode(node=name, gpu=gpu, virtual=False) for name in names or ("n0", "n1")]


def collective(kind, scope, *, alpha_s, bytes_per_s, node=0, ranks=2):
    sizes = (1_000, 1_000_000, 100_000_000)
    return tuple(
        CollectiveSample(
            collective=kind,
            scope=scope,
            node_rank=node,
            ranks=ranks,
            groups=2,
            bytes=size,
            seconds=alpha_s + size / bytes_per_s,
        )
        for size in sizes
    )


def fleet(*rates, gpu="h100", what="link_bytes_per_s"):
    """Nodes n0, n1, ... that differ in one rate."""
    return tuple(
        NodeMeasurement(node=f"n{i}", gpu=gpu, devices=8, at_s=1000.0, **{what: rate}) for i, rate in enumerate(rates)
    )


def profile(*nodes, **more):
    return Profile(at="2026-11-21T15:00:00Z", at_s=1000.0, nodes=nodes, **more)


def pairs(**rates):
    named = {tuple(name.split("_")): rate for name, rate in rates.items()}
    return tuple(
        PairMeasurement(first=first, second=second, bytes_per_s=rate) for (first, second), rate in named.items()
    )


# ---- the alpha-beta fit ----------------------------------------------------------------------------------------------


def test_fit_finds_the_latency_and_the_bandwidth_that_made_the_points():
    alpha_s, beta = fit_alpha_beta([(size, 20e-6 + size / 5e9) for size in (8_192, 262_144, 8_388_608, 268_435_456)])
    assert alpha_s == pytest.approx(20e-6)
    assert 1 / beta == pytest.approx(5e9)


def test_fit_is_not_bent_by_one_noisy_large_message():
    alpha_s, _ = fit_alpha_beta([(1_000, 20e-6), (10_000, 22e-6), (100_000, 40e-6), (100_000_000, 30e-3)])
    assert alpha_s == pytest.approx(20e-6, rel=0.1), "by absolute errors the largest point alone would set it"


def test_fit_never_gives_a_negative_latency_or_an_endless_bandwidth():
    shrinking = fit_alpha_beta([(1_000, 10e-6), (1_000_000, 9e-6)])
    concave = fit_alpha_beta([(1_000, 1e-6), (1_000_000, 10e-3)])
    alone = fit_alpha_beta([(1_000, 1e-3)])
    assert all(alpha_s >= 0 and beta > 0 for alpha_s, beta in (shrinking, concave, alone))
    assert alone[0] == 0.0
    assert alone[1] == pytest.approx(1e-6)


# ---- samples become a profile ----------------------------------------------------------------------------------------


def test_all_reduce_of_four_ranks_counts_its_six_steps_and_what_each_rank_sends():
    found = build_profile(
        samples(
            devices=(4,),
            collectives=collective(
                Collective.ALL_REDUCE, CollectiveScope.WITHIN, alpha_s=60e-6, bytes_per_s=2e9, ranks=4
            ),
        ),
        members("n0"),
    )
    (node,) = found.nodes
    assert node.within_latency_s == pytest.approx(10e-6)
    assert node.within_bytes_per_s == pytest.approx(2e9 * 6 / 4)


def test_all_to_all_counts_what_leaves_the_rank():
    found = build_profile(
        samples(
            collectives=(
                *collective(Collective.ALL_REDUCE, CollectiveScope.BETWEEN, alpha_s=1e-5, bytes_per_s=1e9),
                *collective(Collective.ALL_TO_ALL, CollectiveScope.BETWEEN, alpha_s=1e-5, bytes_per_s=1e9),
            )
        ),
        members(),
    )
    (between,) = found.between
    assert between.all_reduce_bytes_per_s == pytest.approx(1e9), "2 (n - 1) / n is 1 for two ranks"
    assert between.all_to_all_bytes_per_s == pytest.approx(0.5e9), "half of the buffer stays"


def test_a_device_counts_by_its_best_size_and_a_node_by_its_median_and_its_slowest_device():
    def product(rank, size, flops):
        return ProductSample(node_rank=0, rank=rank, precision="bf16", size=size, flops_per_s=flops)

    found = build_profile(
        samples(
            devices=(3,),
            products=(
                product(0, 1, 5.0),
                product(0, 2, 9.0),
                product(1, 2, 8.0),
                product(2, 1, 2.0),
                product(2, 2, 1.0),
            ),
        ),
        members("n0"),
    )
    (node,) = found.nodes
    assert (node.flops, node.worst_flops) == ({"bf16": 8.0}, {"bf16": 2.0})


def test_of_two_passes_the_better_counts():
    def twice(first, second):
        pair = [PairSample(first=0, second=1, bytes=100, seconds=seconds) for seconds in (first, second)]
        copies = [CopySample(node_rank=0, rank=0, bytes_per_s=1 / seconds) for seconds in (first, second)]
        writes = [WriteSample(node_rank=0, bytes=100, seconds=seconds) for seconds in (first, second)]
        return build_profile(samples(pairs=tuple(pair), copies=tuple(copies), writes=tuple(writes)), members())

    assert twice(1.0, 4.0) == twice(4.0, 1.0)
    assert twice(4.0, 1.0).pairs == pairs(n0_n1=100.0)


def test_nodes_come_by_name_whatever_their_rank_in_the_job():
    found = build_profile(samples(writes=(WriteSample(node_rank=0, bytes=10, seconds=1.0),)), members("n1", "n0"))
    assert [(node.node, node.storage_bytes_per_s) for node in found.nodes] == [("n0", None), ("n1", 10.0)]


def test_samples_of_other_nodes_than_the_jobs_are_refused():
    with pytest.raises(BadRequest, match="measured 2 nodes, but the job had 1"):
        build_profile(samples(), members("n0"))
    with pytest.raises(BadRequest, match="one accelerator"):
        build_profile(samples(), [*members("n0"), *members("n1", gpu="a100")])


# ---- the tournament of pairs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_no_node_twice_in_a_round(nodes):
    played = tournament_rounds(nodes, most=100)
    assert sorted(pair for pairs in played for pair in pairs) == [
        (a, b) for a in range(nodes) for b in range(a + 1, nodes)
    ]
    for pairs in played:
        seen = [node for pair in pairs for node in pair]
        assert len(set(seen)) == len(seen)


@pytest.mark.slow
def test_a_large_fleet_plays_some_rounds_only_and_a_node_alone_none():
    played = tournament_rounds(1000, most=8)
    assert len(played) == 8
    assert {len(pairs) for pairs in played} == {500}
    assert tournament_rounds(1, most=8) == []


# ---- what is read off it ---------------------------------------------------------------------------------------------


def test_rates_are_medians_over_the_nodes_of_one_accelerator():
    mixed = profile(
        *(
            NodeMeasurement(node=f"n{i}", gpu="h100", devices=8, flops={"bf16": flops})
            for i, flops in enumerate((6e14, 7e14, 2e14))
        ),
        NodeMeasurement(node="old", gpu="v100", devices=8, flops={"fp16": 1e14}),
        between=(InterNodeMeasurement(gpu="h100", nodes=3, groups=8, all_reduce_bytes_per_s=4e10, latency_s=1e-5),),
    )
    h100, v100 = measured_rates(mixed, gpu="h100"), measured_rates(mixed, gpu="v100")
    assert (h100.flops, h100.between_bytes_per_s) == ({"bf16": 6e14}, 4e10)
    assert (v100.flops, v100.between_bytes_per_s) == ({"fp16": 1e14}, None)
    assert h100.memory_bytes_per_s is None, "what was not measured is not made up"


def test_the_collective_among_the_most_nodes_is_what_a_plan_counts_with():
    def between(nodes, rate):
        return InterNodeMeasurement(gpu="h100", nodes=nodes, groups=8, all_reduce_bytes_per_s=rate, latency_s=1e-5)

    assert measured_rates(profile(between=(between(16, 3e10), between(2, 5e10)))).between_bytes_per_s == 3e10


def test_a_node_that_gives_less_than_its_peers_is_slow_and_one_that_gives_more_is_not():
    (slow,) = slow_parts(profile(*fleet(100.0, 98.0, 80.0, 140.0)))
    assert (slow.part, slow.what, slow.value, slow.median) == ("n2", "link", 80.0, 99.0)
    assert slow.share == pytest.approx(0.192, abs=0.001)


def test_differences_of_healthy_devices_name_nobody():
    assert slow_parts(profile(*fleet(100.0, 92.0, 108.0, 95.0))) == ()


def test_a_node_is_judged_by_its_slowest_device():
    nodes = [
        NodeMeasurement(node=f"n{i}", gpu="h100", devices=8, flops={"bf16": 100.0}, worst_flops={"bf16": worst})
        for i, worst in enumerate((97.0, 70.0, 96.0))
    ]
    assert slow_nodes(profile(*nodes)) == ("n1",)


def test_an_older_accelerator_is_not_slow_beside_a_newer_one():
    assert slow_parts(profile(*fleet(100.0, 99.0), replace(fleet(40.0, gpu="a100")[0], node="old"))) == ()


def test_one_bad_cable_is_named_by_its_pair():
    links = pairs(n0_n1=100.0, n0_n2=101.0, n0_n3=99.0, n1_n2=50.0, n1_n3=100.0, n2_n3=100.0)
    assert [slow.part for slow in slow_parts(profile(*fleet(100.0, 100.0, 100.0, 100.0), pairs=links))] == ["n1 - n2"]


def test_a_slow_nodes_pairs_are_not_named_beside_it():
    links = pairs(n0_n1=100.0, n0_n2=101.0, n0_n3=50.0, n1_n2=99.0, n1_n3=50.0, n2_n3=50.0)
    assert [slow.part for slow in slow_parts(profile(*fleet(100.0, 100.0, 100.0, 50.0), pairs=links))] == ["n3"]


# ---- whole steps beside their parts ----------------------------------------------------------------------------------


def slowdown(*runs):
    machine = build_machine(parse_gpus("2xh100:2"))
    found = profile(NodeMeasurement(node="n0", gpu="NVIDIA H100", devices=2, flops={"bf16": 6e14}), runs=runs)
    expected_s = predict_step_s(RUN, found, machine, physics(), find_stack(CALIBRATION_STACK))
    return measure_slowdown(found, "NVIDIA H100", machine, physics(), find_stack(CALIBRATION_STACK)), expected_s


def test_steps_that_take_twice_and_half_as_long_as_promised_cancel_out():
    _, promised_s = slowdown()
    twice, half = (replace(RUN, gpu="NVIDIA H100", step_s=factor * promised_s) for factor in (2.0, 0.5))
    assert slowdown(twice)[0] == pytest.approx(2.0)
    assert slowdown(twice, half)[0] == pytest.approx(1.0)


def test_short_trainings_faster_than_promised_make_no_plan_faster():
    _, promised_s = slowdown()
    assert slowdown(replace(RUN, gpu="NVIDIA H100", step_s=0.75 * promised_s))[0] == 1.0


def test_a_disturbed_run_and_one_on_another_accelerator_say_nothing():
    _, promised_s = slowdown()
    noisy = replace(RUN, gpu="NVIDIA H100", step_s=9 * promised_s, spread=0.8)
    assert slowdown(noisy, replace(RUN, gpu="A100", step_s=9 * promised_s))[0] == 1.0


# ---- whether to believe it -------------------------------------------------------------------------------------------


def test_a_fresh_profile_of_the_whole_fleet_holds():
    assert stale_reasons(profile(*fleet(1.0, 1.0)), 1000.0 + 3600, {"n0": ("h100", 8), "n1": ("h100", 8)}) == ()


def test_age_new_nodes_and_changed_devices_make_it_stale():
    now_s = 1000.0 + VALID_S + 86400
    said = stale_reasons(profile(*fleet(1.0, 1.0)), now_s, {"n0": ("h200", 8), "n1": ("h100", 4), "n7": ("h100", 8)})
    assert said == (
        "it is 31 days old; a profile is valid for 30 days",
        "n7 was never measured",
        "the devices of n0, n1 have changed since",
    )


def test_a_node_that_left_the_fleet_is_no_reason():
    assert stale_reasons(profile(*fleet(1.0, 1.0)), 1000.0, {"n0": ("h100", 8)}) == ()


# ---- a few nodes measured anew ---------------------------------------------------------------------------------------


def test_nodes_measured_anew_replace_their_own_figures_and_keep_the_others():
    old = profile(*fleet(1.0, 2.0, 3.0), pairs=pairs(n0_n1=10.0, n1_n2=12.0))
    new = profile(*fleet(7.0, 8.0), pairs=pairs(n0_n1=11.0))
    both = merge_profiles(old, new, {"n0", "n1", "n2"})
    assert [(node.node, node.link_bytes_per_s) for node in both.nodes] == [("n0", 7.0), ("n1", 8.0), ("n2", 3.0)]
    assert both.pairs == pairs(n0_n1=11.0, n1_n2=12.0)


def test_nodes_that_left_are_forgotten_with_their_pairs():
    old = profile(*fleet(1.0, 2.0, 3.0), pairs=pairs(n0_n2=10.0))
    both = merge_profiles(old, profile(*fleet(7.0)), {"n0", "n1"})
    assert ([node.node for node in both.nodes], both.pairs) == (["n0", "n1"], ())


def test_runs_of_another_shape_stay_and_of_the_same_are_replaced():
    small = replace(RUN, nodes=1, layout=Layout(tensor=2))
    both = merge_profiles(
        profile(*fleet(1.0), runs=(RUN, small)), profile(*fleet(1.0), runs=(replace(RUN, step_s=0.4),)), {"n0"}
    )
    assert sorted((run.nodes, run.step_s) for run in both.runs) == [(1, 0.5), (2, 0.4)]


def test_the_first_calibration_has_nothing_to_merge_with():
    assert merge_profiles(None, profile(*fleet(1.0)), {"n0"}) == profile(*fleet(1.0))


# ---- as plain values -------------------------------------------------------------------------------------------------


def whole():
    return profile(
        *fleet(1.0, 2.0),
        job="7",
        pairs=pairs(n0_n1=10.0),
        runs=(RUN,),
        between=(InterNodeMeasurement(gpu="h100", nodes=2, groups=8, all_reduce_bytes_per_s=1.0, latency_s=0.0),),
    )


def test_a_profile_and_samples_come_back_from_plain_values_as_they_were():
    assert parse_profile(encode_record(whole())) == whole()
    raw = samples(
        collectives=collective(Collective.ALL_TO_ALL, CollectiveScope.WITHIN, alpha_s=0.0, bytes_per_s=1e9), runs=(RUN,)
    )
    assert decode_record(Samples, encode_record(raw)) == raw


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"at_s": "soon"}, "profile.at_s is 'soon'; it must be a finite number"),
        ({"at_s": float("nan")}, "it must be a finite number"),
        ({"quick": 1}, "profile.quick is 1; it must be true or false"),
        ({"nodez": []}, "unknown field 'nodez'"),
        ({"nodes": "n0"}, "profile.nodes is 'n0'; it must be a list"),
        ({"nodes": [{"node": "n0"}]}, "profile.nodes[0] lacks gpu, devices"),
        ({"nodes": []}, "has no nodes"),
        ({"nodes": [*encode_record(fleet(1.0)), *encode_record(fleet(1.0))]}, "lists a node twice"),
        ({"nodes": encode_record(fleet(1.0, -1.0))}, "node n1: link_bytes_per_s is -1.0; it must be above 0"),
        ({"pairs": encode_record(pairs(n0_n9=1.0))}, "the pair n0 - n9, but not both of its nodes"),
        ({"runs": [encode_record(replace(RUN, step_s=0.0))]}, "step_s is 0.0; it must be above 0"),
    ],
)
def test_what_is_no_profile_is_refused_by_field(change, said):
    with pytest.raises(BadRequest) as refused:
        parse_profile({**encode_record(whole()), **change})
    assert said in refused.value.message


def test_a_list_is_no_profile():
    with pytest.raises(BadRequest, match="it must be an object"):
        parse_profile([])


def test_a_missing_time_is_refused():
    with pytest.raises(BadRequest, match="profile lacks at, at_s"):
        parse_profile({"nodes": encode_record(fleet(1.0))})
