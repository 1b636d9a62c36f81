"""The words of `phalanx plan`: what they ask, and what is refused in one line."""

import pytest

from phalanx.cli.root import main
from phalanx.core.errors import BadRequest
from phalanx.core.work.gang_topology import parse_gbit_per_s
from phalanx.planner.cost.training_task import TrainingMethod
from phalanx.plans.amounts import (
    format_decimal_bytes,
    format_rounded,
    format_seconds,
    format_span,
    format_tokens,
    format_usd,
    parse_tokens,
    parse_usd,
)
from phalanx.plans.option_words import PLAN_DEFAULTS
from phalanx.plans.request import format_price, parse_plan_inputs


@pytest.fixture(autouse=True)
def _own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def question(model="llama-3-8b", gpus="h100:8", **options):
    return parse_plan_inputs({**PLAN_DEFAULTS, "model": model, "gpus": gpus, **options})


def test_machine_and_model_are_what_the_names_mean():
    asked = question("llama-3-70b", "4xh100:8", tokens="300B")
    assert (asked.model.layers, asked.machine.nodes, asked.machine.gpus_per_node) == (80, 4, 8)
    assert asked.machine.gpu.name == "h100-sxm5-80gb"
    assert asked.summary == (
        "llama-3-70b (70.6B parameters), full training on 300B tokens: 4 nodes x 8 = 32 h100-sxm5-80gb, sequence 4096, "
        "global batch 1024, bf16"
    )


def test_unstated_batch_is_four_million_tokens_and_said():
    assert question(seq="8192").global_batch == 512
    assert question(method="lora").global_batch == 64
    assert any("global batch not stated: 512 sequences = 4.19M tokens" in note for note in question(seq="8192").notes)
    assert question(layout="fsdp=8,mbs=2,accumulate=4").global_batch == 64


def test_precision_is_the_best_that_the_gpu_has():
    assert question().precision == "bf16"
    assert question(gpus="v100-32gb:8").precision == "fp16"
    assert question(precision="FP8").precision == "fp8"


def test_own_price_is_of_today_or_of_the_day_given():
    asked = question(price="$2.10", price_date="2026-10")
    assert format_price(asked.machine.price) == "$2.10 a GPU-hour (own price, given, 2026-10)"
    assert question(price="2.10").machine.price.fact.date.startswith("20")


def test_network_is_a_rate_or_a_name():
    assert question(gpus="2xh100:8", network="200gbit").machine.network_bytes_per_s == 25e9
    assert question(gpus="2xh100:8", network="ib-xdr").machine.network_bytes_per_s == 100e9


def test_instance_brings_gpu_network_and_price():
    asked = question(gpus="16", instance="p5.48xlarge")
    assert (asked.machine.nodes, asked.machine.gpus_per_node, asked.machine.network_kind) == (2, 8, "efa")
    assert "AWS p5.48xlarge" in format_price(asked.machine.price)


def test_adapters_are_a_method():
    assert question(method="QLoRA").method is TrainingMethod.QLORA


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("llama-9-8b", "--gpus", "h100:8"), "model: unknown model 'llama-9-8b'"),
        (("llama-3-8b",), "no GPUs given (add --gpus 4xh100:8, or --fleet here"),
        (("llama-3-8b", "--gpus", "8"), "has no GPU model"),
        (("llama-3-8b", "--gpus", "h1000:8"), "unknown GPU"),
        (("llama-3-8b", "--gpus", "h100:0"), "at least one GPU"),
        (("llama-3-8b", "--gpus", "h100:8", "--seq", "-1"), "--seq: '-1' is not a positive integer"),
        (("llama-3-8b", "--gpus", "h100:8", "--global-batch", "0"), "--global-batch: '0' is not a positive integer"),
        (("llama-3-8b", "--gpus", "h100:8", "--tokens", "-3B"), "--tokens: '-3B' is not a number of tokens"),
        (("llama-3-8b", "--gpus", "h100:8", "--price", "cheap"), "--price: 'cheap' is not an amount in US dollars"),
        (("llama-3-8b", "--gpus", "h100:8", "--price-date", "2026-11"), "--price-date needs --price"),
        (("llama-3-8b", "--gpus", "v100:8", "--precision", "fp8"), "does not support fp8"),
        (("llama-3-8b", "--gpus", "h100:8", "--precision", "bf61"), "did you mean bf16?"),
        (("llama-3-8b", "--gpus", "h100:8", "--stack", "megatronn-core"), "unknown stack"),
        (("llama-3-8b", "--gpus", "h100:8", "--network", "0gbit"), "has no bandwidth"),
        (("llama-3-8b", "--gpus", "h100:8", "--network", "string"), "string"),
        (("llama-3-8b", "--gpus", "h100:8", "--layout", "tp=2,tp=2"), "given twice"),
        (("llama-3-8b", "--gpus", "h100:8", "--save", "plan.txt"), "the name must end in .json"),
        (("llama-3-8b", "--gpus", "h100:8", "--plot", "plan.gif"), "must end in .svg, .png or .html"),
        (("layers=-2,hidden=64,heads=4,vocab=100", "--gpus", "h100:8"), "layers"),
        (
            ("--fleet", "here", "--instance", "p5.48xlarge", "llama-3-8b"),
            "--fleet here and --instance exclude each other",
        ),
    ],
)
def test_wrong_words_are_one_line(capsys, words, told):
    assert main(["plan", *words]) in {64, 78}
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_price_list_without_a_date_is_refused(capsys, tmp_path):
    (tmp_path / "own.csv").write_text(
        "offer,gpu,kind,region,usd_per_gpu_hour,source,date\nours,h100,on-demand,,2.0,invoice,\n"
    )
    assert main(["plan", "llama-3-8b", "--gpus", "h100:8", "--prices", "own.csv"]) == 78
    error = capsys.readouterr().err
    assert "own.csv" in error
    assert "date" in error
    assert error.count("\n") == 1


def test_config_of_another_kind_names_it(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5", "hidden_size": 64}')
    assert main(["plan", "config.json", "--gpus", "h100:8"]) == 78
    assert "t5" in capsys.readouterr().err


def test_amounts_are_read_as_people_write_them():
    assert [parse_tokens(text) for text in ("300B", "1.5t", "20000")] == [3e11, 1.5e12, 2e4]
    assert [parse_gbit_per_s(text) for text in ("400gbit", "400", "3.2G", "ib-ndr")] == [400.0, 400.0, 3.2, None]
    assert parse_usd("$2.69") == 2.69
    for text in ("0", "1e30", "B", "-1B", "99999999T"):
        with pytest.raises(BadRequest):
            parse_tokens(text)


def test_amounts_have_as_many_figures_as_estimates_deserve():
    assert [format_seconds(value) for value in (0.00009, 0.0341, 1.925, 12.5, 1234.0)] == [
        "90.0 µs",
        "34.1 ms",
        "1.93 s",
        "12.5 s",
        "1,234 s",
    ]
    assert [format_decimal_bytes(value) for value in (1.12e12, 74.25e9, 1.9e6)] == ["1.12 TB", "74.2 GB", "1.90 MB"]
    assert [format_span(value) for value in (90.0, 7200.0, 5.2 * 86400, 23 * 86400)] == [
        "90 seconds",
        "2 hours",
        "5.2 days",
        "23 days",
    ]
    assert [format_usd(value) for value in (3.2, 49321.0, 12345.0)] == ["$3.20", "$49,000", "$12,300"]
    assert [format_tokens(value) for value in (3e11, 1.5e12, 4194304)] == ["300B", "1.5T", "4.19M"]
    assert format_rounded(0.0) == "0"
