"""One GPT of about a million parameters under every layout: the same losses, and checkpoints that load into each other.

All layouts of one number of ranks run one after another in the same processes (`layouts_loop.py`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from phalanx.core.work.layouts.layout import layout_to_json, parse_layout
from tests.torch import gang as gangs
from tests.torch.gang import ROOT, Gang

pytestmark = [pytest.mark.torch, pytest.mark.serial, pytest.mark.timeout(600)]

LOOP = ROOT / "tests/torch/layouts_loop.py"
SAVED, STEPS = 2, 4
FOUR = {
    "ddp": "dp=4",
    "fsdp": "fsdp=4",
    "tp": "tp=4",
    "pp": "pp=4,accumulate=4",
    "fsdp_tp": "fsdp=2,tp=2",
    "pp_fsdp": "pp=2,fsdp=2,accumulate=2",
}
EIGHT = {"3d": "tp=2,pp=2,fsdp=2,accumulate=2"}
SEVEN = (*FOUR, *EIGHT)
OTHERS = {
    "hybrid": "dp=2,fsdp=2",
    "zero1": "fsdp=4,zero=1,accumulate=2",
    "sequence_fsdp": "tp=2,sp=1,fsdp=2",
    "interleaved": "pp=2,vpp=2,dp=2,accumulate=4",
    "recompute": "fsdp=4,recompute=full,accumulate=2",
    "context": "cp=2,dp=2",
    "context_tp": "cp=2,tp=2,sp=1,recompute=full",
    "order": "tp=2,fsdp=2,order=shard-tensor-context-replicate-pipeline",
}
HALF = {"half_fsdp": "fsdp=4,precision=bf16", "half_pp_tp": "pp=2,tp=2,accumulate=2,precision=bf16"}


def orders(layouts, *, read=()):
    """For the loop: train each of `layouts`; or, with `read`, load into each what those others saved."""
    return [
        f"{name}:{words}" + "".join(f"<{other}" for other in read if other != name) for name, words in layouts.items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module", autouse=True)
def patience():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gangs, "HANG_S", 500.0)
        yield


def run(folder, ranks, *arguments):
    """What the first and the last rank said, equal; by (name, other)."""
    with Gang(folder, LOOP, "--checkpoints", folder / "ck", *arguments, world_size=ranks, supervised=False) as gang:
        assert gang.finish() == [0] * ranks, gang.log(0)
        ends = [_said(gang.log(rank)) for rank in sorted({0, ranks - 1})]
    assert {key: said["losses"] for key, said in ends[0].items()} == {
        key: said["losses"] for key, said in ends[-1].items()
    }
    return ends


def _said(log):
    said = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return {(one["name"], one["of"]): one for one in said}


def losses(ends):
    """Step by step the loss, and the norm of the whole gradient, of each run; after a run from the beginning what `evaluate` gave."""
    return {key: [tuple(step) for step in said["losses"]] for key, said in ends[0].items()}


def same(one, other, rel=2e-5):
    return [pytest.approx(step, rel=rel) for step in one] == other


@pytest.fixture(scope="module")
def trained(folder):
    """Every layout from the beginning, each with a checkpoint of step 2; its losses and gradient norms by name."""
    found: dict[Any, Any] = {}
    for ranks, layouts in ((1, {"single": "single"}), (8, EIGHT), (4, FOUR)):
        ends = run(folder, ranks, *orders(layouts))
        found |= {name: (steps, ends) for (name, _), steps in losses(ends).items()}
    return found


def test_every_layout_gives_the_losses_of_one_rank(trained):
    alone, _ = trained["single"]
    assert (
        alone[STEPS - 1][0] < alone[0][0] - 0.3
    )  # it learns: an optimizer that stands still would make all of them equal
    assert {name for name, (steps, _) in trained.items() if same(alone, steps)} == {"single", *SEVEN}


def test_pipeline_ranks_hold_their_own_layers_under_the_names_of_the_whole(trained):
    _, (first, last) = trained["pp"]
    assert first["pp", ""]["held"] == ["blocks.0", "embed.weight"]
    assert last["pp", ""]["held"] == ["blocks.3", "head.weight", "norm.weight"]


def test_checkpoint_of_each_layout_loads_into_the_next_two(trained, folder):
    """Each of the seven is written and read twice, over every width; all pairs are in `make prove`."""
    near = {reader: [SEVEN[(at + step) % len(SEVEN)] for step in (1, 3)] for at, reader in enumerate(SEVEN)}
    check_loads(trained, folder, near)


@pytest.mark.prove
def test_checkpoint_of_each_layout_loads_into_each_other(trained, folder):
    check_loads(trained, folder, dict.fromkeys(SEVEN, SEVEN))


def check_loads(trained, folder, writers):
    """Load into each reader what its writers saved, and go on."""
    alone, _ = trained["single"]
    found: dict[Any, Any] = {}
    for ranks, layouts in ((8, EIGHT), (4, FOUR)):
        asked = [order for name, words in layouts.items() for order in orders({name: words}, read=writers[name])]
        found |= losses(run(folder, ranks, *asked))
    found |= losses(run(folder, 1, *orders({"single": "single"}, read=EIGHT)))
    pairs = {(reader, one) for reader in SEVEN for one in writers[reader] if reader != one} | {("single", "3d")}
    # The first loss shows the parameters, the next one the optimizer's state.
    assert {pair for pair, steps in found.items() if same(alone[SAVED:STEPS], steps)} == pairs


def test_further_splits_give_the_same_losses(trained, folder):
    alone, _ = trained["single"]
    found = losses(run(folder / "others", 4, *orders(OTHERS)))
    assert {name for (name, _), steps in found.items() if same(alone, steps)} == set(OTHERS)


def test_half_precision_computes_alike_under_every_layout(trained, folder):
    alone, _ = trained["single"]
    found = losses(run(folder / "half", 4, *orders(HALF)))
    # bf16 has 8 bits; the loss is a mean of many and keeps 3 digits.
    assert {name for (name, _), steps in found.items() if same(alone, steps, rel=3e-3)} == set(HALF)
    assert not any(same(alone, steps, rel=1e-6) for steps in found.values())


def test_norm_inside_split_attention_is_applied_to_the_whole_stream(folder):
    layouts = {"ddp": "dp=4", "sequence": "tp=2,sp=1,dp=2"}
    first, other = losses(run(folder / "inner", 4, "--inner-norm", *orders(layouts))).values()
    assert same(first, other)


def test_tied_embedding_trains_and_loads_where_ranks_hold_the_whole_chain(folder):
    layouts = {"ddp": "dp=2", "fsdp": "fsdp=2", "half": "dp=2,precision=bf16"}
    found = losses(run(folder / "tied", 2, "--tied", *orders(layouts), "again:fsdp=2<ddp", "back:dp=2<fsdp"))
    alone = found["ddp", ""]
    assert same(alone, found["fsdp", ""])
    assert same(alone, found["half", ""], rel=1e-2)
    assert same(alone[SAVED:STEPS], found["again", "ddp"])
    assert same(alone[SAVED:STEPS], found["back", "fsdp"])


def test_tied_embedding_stays_one_parameter_when_it_leaves_the_meta_device(folder):
    ends = run(folder / "tied_meta", 2, "--tied", "--meta", *orders({"ddp": "dp=2", "fsdp": "fsdp=2"}))
    assert {"head.weight" in said["held"] for said in ends[0].values()} == {False}
    first, other = losses(ends).values()
    assert same(first, other)


def test_model_on_the_meta_device_gets_the_same_values_under_every_layout(folder):
    layouts = {name: FOUR[name] for name in ("fsdp", "pp", "fsdp_tp")}
    found = losses(run(folder / "meta", 4, "--meta", *orders(layouts)))
    first, *others = found.values()
    assert [same(first, other) for other in others] == [True, True]


def test_example_runs_its_plan_and_goes_on_with_half_the_ranks(tmp_path):
    script = ROOT / "examples/gpt_layouts/train.py"
    said = {"PHALANX_LAYOUT": json.dumps(layout_to_json(parse_layout("tp=2,fsdp=2,precision=fp32")))}
    often = ("--print-every", "1", "--batch", "8", "--length", "32", "--save-every-steps", "2")
    with Gang(tmp_path / "straight", script, "--steps", "4", *often, supervised=False) as gang:
        assert gang.finish() == [0], gang.log()
        straight = [line for line in gang.log().splitlines() if line.startswith("step")]
    own = {"supervised": False, "checkpoints": tmp_path / "ck", **said}
    with Gang(tmp_path / "four", script, "--steps", "2", *often, world_size=4, **own) as gang:
        assert gang.finish() == [0] * 4, gang.log()
        assert "phalanx: layout tp=2,fsdp=2,precision=fp32: 4 ranks" in gang.log()
        before = [line for line in gang.log().splitlines() if line.startswith("step")]
    with Gang(tmp_path / "two", script, "--steps", "4", *often, world_size=2, **own) as gang:
        assert gang.finish() == [0] * 2, gang.log()
        assert "phalanx: layout tp=2,accumulate=2,precision=fp32: 2 ranks" in gang.log()
        after = [line for line in gang.log().splitlines() if line.startswith("step")]
    assert len(straight) == 4
    assert [*before, *after] == straight
