"""Samples of unequal length: what pads, packs and waiting cost, beside simulated samples and published steps."""

import random
from dataclasses import replace

import pytest

import benchmarks.planner
from benchmarks.fitting import predicted
from benchmarks.published_runs import read_runs
from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import parse_layout
from phalanx.planner.cost.sequence_lengths import SequenceBatching
from phalanx.planner.facts.coefficient_table import coefficients
from phalanx.planner.search.sample_batches import SampleBatches
from phalanx.plans.headline import effect_text, samples_text
from phalanx.plans.option_words import PACKINGS
from tests.planned import planned

ASKED = {"method": "lora", "seq": "4096", "global_batch": "64"}


def batches(batching, mean=600, longest=4096):
    return SampleBatches(mean, longest, SequenceBatching(batching))


def drawn(samples, count, seed):
    """Lengths that end at every token with the same probability, at the latest at the limit."""
    source = random.Random(seed)
    scale = samples.lengths.scale
    return [min(float(samples.longest), source.expovariate(1.0 / scale)) for _ in range(count)]


def test_the_words_of_the_option_are_those_that_are_planned():
    assert tuple(PACKINGS) == tuple(SequenceBatching)


@pytest.mark.parametrize(("micro", "shards"), [(1, 1), (8, 1), (4, 8)])
def test_pads_are_those_of_simulated_batches(micro, shards):
    samples = batches("padded")
    layout = parse_layout(f"fsdp={shards},mbs={micro},accumulate=4" if shards > 1 else f"mbs={micro},accumulate=4")
    together = micro * shards
    lengths = drawn(samples, 4000 * together, seed=together)
    longest = [max(lengths[at : at + together]) for at in range(0, len(lengths), together)]
    assert samples.positions(layout) == pytest.approx(sum(longest) / len(longest), rel=0.03)
    assert samples.wasted(layout) == pytest.approx(1.0 - 600 / samples.positions(layout))


def test_packs_are_nearly_full_and_attend_to_one_sample():
    samples = batches("packed")
    layout = parse_layout("mbs=1")
    assert samples.positions(layout) == 4096.0
    assert 0.95 < samples.tokens / 4096 < 1.0
    lengths = drawn(samples, 20000, seed=1)
    scores = sum(one * one for one in lengths) / sum(lengths)  # for each token
    assert samples.attended(layout) == pytest.approx(scores * samples.tokens / 4096**2, rel=0.03)
    assert batches("padded").attended(layout) == 1.0


def test_ranks_wait_for_the_fullest_of_unpadded_micro_batches():
    samples = batches("unpadded")
    alone, sharded, larger = (
        samples.positions(parse_layout(one)) for one in ("mbs=4", "fsdp=8,mbs=4", "fsdp=8,mbs=16")
    )
    assert alone == 600.0
    assert alone < larger < sharded < batches("padded").positions(parse_layout("fsdp=8,mbs=4"))
    once, often = (samples.positions(parse_layout(f"dp=8,mbs=4,accumulate={count}")) for count in (1, 16))
    assert once > often > 600.0  # without sharding they wait once a step


def test_equal_samples_are_whole_sequences():
    equal = planned("llama-3-8b", "a100-80gb:8", layout="dp=8,mbs=1,accumulate=8", mean_length="4096", **ASKED)
    plain = planned("llama-3-8b", "a100-80gb:8", layout="dp=8,mbs=1,accumulate=8", **ASKED)
    assert equal.layouts[0].step_s.mid == pytest.approx(plain.layouts[0].step_s.mid, rel=0.01)


def test_packing_counts_tokens_and_stands_beside_padding():
    layout = "dp=8,mbs=4,accumulate=2,recompute=full"
    padded, packed = (
        planned("llama-3-8b", "a100-80gb:8", layout=layout, mean_length="600", packing=one, **ASKED)
        for one in ("padded", "packed")
    )
    assert padded.step_tokens == 64 * 600
    assert packed.step_tokens == round(batches("packed").tokens) * 64
    faster = packed.layouts[0].tokens_per_s / padded.layouts[0].tokens_per_s
    assert padded.samples.packed_speed == pytest.approx(faster)
    assert 2.0 < faster < 4.0
    assert padded.samples.wasted > 0.5
    assert packed.samples.wasted < 0.05
    effect = packed.effects[0]
    assert effect.option == "packing packed"
    assert effect.added_s < 0.0  # as many samples, padded, take longer
    assert padded.effects == ()


def test_an_option_that_changes_nothing_says_so():
    """One sequence at a time on one GPU has neither pads nor waits."""
    alone = {"layout": "mbs=1,accumulate=8", **ASKED, "global_batch": "8"}
    answer = planned("llama-3-8b", "a100-80gb:1", mean_length="600", packing="unpadded", **alone)
    assert effect_text(answer.effects[0]) == "packing unpadded: changes neither memory nor time of this layout"
    assert "waiting" not in samples_text(answer.samples)
    several = "dp=8,mbs=4,accumulate=2,recompute=full"
    waits = planned("llama-3-8b", "a100-80gb:8", mean_length="600", packing="unpadded", layout=several, **ASKED)
    assert "takes no memory and saves" in effect_text(waits.effects[0])
    assert "waiting for the fullest micro-batch costs" in samples_text(waits.samples)


def test_plain_plans_have_no_samples():
    assert planned("llama-3-8b", "a100-80gb:8", **ASKED).samples is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"packing": "packed"}, "packing needs the mean length"),
        ({"mean_length": "5000"}, "longer than a sequence of 4096"),
        ({"mean_length": "0"}, "mean-length"),
        ({"mean_length": "600", "packing": "tight"}, "must be one of padded, packed, unpadded"),
        ({"mean_length": "600", "method": "grpo"}, "does not belong to method grpo"),
        ({"mean_length": "600", "packing": "packed", "method": "dpo"}, "pairs of answers are not packed"),
    ],
)
def test_what_is_refused(options, error):
    with pytest.raises(BadRequest, match=error):
        planned("llama-3-8b", "a100-80gb:8", **{**ASKED, **options})


def test_published_steps_of_short_samples():
    """github:huggingface/peft method_comparison/MetaMathQA: 210 tokens of at most 768 on average. Nothing was chosen by them."""
    runs = [run for run in read_runs(benchmarks.planner.TUNING)[0] if run.source == "peft-metamath"]
    assert len(runs) == 2
    for run, step in zip(runs, predicted(runs, coefficients()), strict=True):
        assert step.total_s == pytest.approx(run.step_s, rel=0.10)
    whole = predicted([replace(run, samples=None) for run in runs], coefficients())
    assert all(step.total_s > 2.0 * run.measured_s for run, step in zip(runs, whole, strict=True))
