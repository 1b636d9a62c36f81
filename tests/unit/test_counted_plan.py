"""Networks that are no language models: what is counted, data parallel layouts from the counts, and the command."""

import json
import sys
from dataclasses import replace

import pytest

from phalanx.cli.plan.module_counts import count_network
from phalanx.cli.root import main
from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import parse_gpus
from phalanx.planner.counted.data_parallel import CountedNetwork, plan_counted
from phalanx.planner.facts.coefficient_table import physics
from phalanx.planner.facts.machines import build_machine

NETWORK = CountedNetwork(
    name="net",
    batch=64,
    parameters=1_000_000_000,
    trained=1_000_000_000,
    largest_block=40_000_000,
    flops=4e14,
    convolution_flops=0.0,
    convolution_bytes=0.0,
    traffic_bytes=2e11,
    kernels=1000,
    saved_bytes=2e10,
    output_bytes=1e6,
)
MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def build():
    return Net()

def frozen():
    net = Net()
    net.conv.requires_grad_(False)
    return net

def words():
    return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))

def nothing():
    return 3

def broken():
    raise RuntimeError("no weights\\nhere")
"""


def planned(network=NETWORK, gpus="h100:8", micro_batches=1, precision="bf16"):
    machine = build_machine(parse_gpus(gpus))
    found = plan_counted(network, machine, physics(), micro_batches=micro_batches, precision=precision)
    return {one.text: one for one in found}


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "counted_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "counted_models"
    sys.modules.pop("counted_models", None)


@pytest.fixture
def counted(models):
    pytest.importorskip("torch")
    from phalanx.torch.count_module import main as count

    return lambda name, *inputs, precision="bf16": count([f"{models}:{name}", precision, *inputs])


# ---- counts ---------------------------------------------------------------------------------------------------------


def test_parameters_and_flops_are_those_of_the_formulas(counted):
    found = counted("build", "4x3x16x16")
    assert found["parameters"] == 3 * 8 * 9 + 2 * (8 * 8 + 8)
    assert found["batch"] == 4
    forward_conv = 2 * 4 * 16 * 16 * 8 * 3 * 9
    assert found["forward_flops"] == forward_conv + 2 * 2 * 4 * 8 * 8
    assert found["convolution_flops"] == 2 * forward_conv  # the images need no gradient
    assert found["largest_block"] == 72
    assert found["kernels"] > 10


def test_saved_bytes_are_distinct_storages_without_parameters_and_inputs(counted):
    small, large = counted("build", "4x3x16x16"), counted("build", "8x3x16x16")
    # two inputs of linear layers, and two outputs of relu, of which one is the other's input: 4 x 8 numbers of 2 bytes each
    assert small["saved_bytes"] == 3 * 4 * 8 * 2
    assert large["saved_bytes"] == 2 * small["saved_bytes"]
    assert counted("build", "4x3x16x16", precision="fp32")["saved_bytes"] == 2 * small["saved_bytes"]


def test_frozen_parameters_are_not_trained(counted):
    assert counted("frozen", "4x3x16x16")["trained"] == 144


def test_whole_numbers_and_names_are_inputs(counted):
    assert counted("words", "input=2x8:int64")["output_bytes"] == 2 * 8 * 100 * 2


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("nothing", ("2x3",), "gave a int"),
        ("missing", ("2x3",), "has no missing"),
        ("build", ("2xx3",), "is not \\[name=\\]8x3x224x224"),
        ("build", ("2x3:int7",), "int7 is not one of"),
    ],
)
def test_what_cannot_be_counted_is_said(counted, name, inputs, said):
    from phalanx.torch.count_module import Failed

    with pytest.raises(Failed, match=said):
        counted(name, *inputs)


# ---- layouts --------------------------------------------------------------------------------------------------------


def test_copies_hold_all_states_and_shards_their_part():
    found = planned()
    copies, shards = found["dp=8"], found["fsdp=8"]
    assert copies.memory_bytes["optimizer states"] == 8e9
    assert shards.memory_bytes["optimizer states"] == 1e9
    assert copies.memory_bytes["activations"] == shards.memory_bytes["activations"] == 2e10


def test_hybrid_layouts_shard_in_a_node():
    assert set(planned(gpus="2xh100:8")) == {"dp=16", "fsdp=16", "fsdp=8,dp=2"}
    assert set(planned(gpus="h100:1")) == {"dp=1"}


def test_micro_batches_repeat_computing_and_not_the_optimizer():
    one, four = planned()["dp=8"], planned(micro_batches=4)["dp=8,accumulate=4"]
    assert four.step_items_s["products"] == pytest.approx(4 * one.step_items_s["products"])
    assert four.step_items_s["optimizer"] == one.step_items_s["optimizer"]
    assert four.samples_per_s > one.samples_per_s


def test_small_kernels_wait_for_the_host():
    tiny = replace(NETWORK, flops=1e9, traffic_bytes=1e6)
    assert planned(tiny)["dp=8"].step_items_s["waiting for the host"] > 0
    assert planned()["dp=8"].step_items_s["waiting for the host"] == 0


def test_convolutions_of_few_channels_are_bound_by_memory():
    moved = replace(NETWORK, convolution_flops=4e14, convolution_bytes=1e13)
    assert planned(moved)["dp=8"].step_items_s["products"] > 2 * planned()["dp=8"].step_items_s["products"]


def test_what_does_not_fit_comes_last():
    found = list(planned(replace(NETWORK, parameters=6_000_000_000, trained=6_000_000_000)).values())
    assert [one.fits for one in found] == [True, False]
    assert found[0].text == "fsdp=8"


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words):
        code = main(["plan", *words])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return run


def test_a_network_is_counted_by_another_python_and_planned(models, typed):
    pytest.importorskip("torch")
    words = ("--module", f"{models}:build", "--input", "4x3x16x16", "--gpus", "h100:2", "--python", sys.executable)
    code, out, _ = typed(*words, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["counts"]["parameters"] == 360
    assert {one["text"] for one in found["layouts"]} == {"dp=2", "fsdp=2"}
    assert found["next"] == "phalanx run --plan dp=2 -- python train.py"
    with pytest.raises(BadRequest, match="RuntimeError: no weights here"):
        count_network(f"{models}:broken", ["4x3"], precision="bf16", python=sys.executable)


def test_the_page_has_layouts_and_parts(monkeypatch, typed):
    monkeypatch.setattr("phalanx.cli.plan.module_counts.count_network", lambda *_, **__: NETWORK)
    code, out, _ = typed("--module", "a:b", "--input", "64x3", "--gpus", "h100:8", "--global-batch", "1024")
    assert code == 0
    assert out.startswith("dp=8,accumulate=2 fits: ")
    for words in ("fsdp=8,accumulate=2", "activations", "products", "per million samples"):
        assert words in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there is no MODEL"),
        (("llama-3-8b", "--module", "a:b"), "MODEL and --module exclude each other"),
        (("--module", "a:b", "--tokens", "3B"), "--tokens and --module exclude each other"),
        (("--module", "a:b", "--method", "lora"), "--method and --module exclude each other"),
        (("--module", "a:b", "--mean-length", "200"), "--mean-length and --module exclude each other"),
        (("--module", "a:b", "--updates", "2"), "--updates and --module exclude each other"),
        (("--module", "a:b", "--host-memory", "64GiB"), "--host-memory and --module exclude each other"),
        (("--module", "a:b", "--cuda-graphs", "off"), "--cuda-graphs and --module exclude each other"),
        (("--module", "a:b", "--precision", "fp8"), "precision: 'fp8' must be one of"),
        (("--module", "a:b"), "--module needs the shape of its input"),
        (("--module", "a:b", "--input", "2x3", "--python", "/nothing/there"), "--python /nothing/there"),
        (("--module", "a:b", "--serve", "--users", "3"), "--module and --serve exclude each other"),
        (("llama-3-8b", "--input", "2x3"), "--input needs --module"),
        (("llama-3-8b", "--python", "python3"), "--python needs --module"),
    ],
)
def test_nonsense_gets_one_line(typed, words, said):
    code, out, err = typed(*words, "--gpus", "h100:8")
    assert code not in (0, 1)
    assert out == ""
    assert said in err
    assert err.count("phalanx: error:") == 1


def test_a_batch_that_does_not_divide_says_the_next_one(monkeypatch, typed):
    monkeypatch.setattr("phalanx.cli.plan.module_counts.count_network", lambda *_, **__: NETWORK)
    _, _, err = typed("--module", "a:b", "--input", "64x3", "--gpus", "h100:8", "--global-batch", "1000")
    assert "not divisible by 8 GPUs x 64 samples" in err
    assert "--global-batch 1024" in err
