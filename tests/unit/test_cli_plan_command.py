"""`phalanx plan` from the words to the answer, with the real planner: what fits, what does not, and how the answer is run."""

import itertools
import json
import re

import pytest

from phalanx.cli.plan.plan_option import parse_plan_option
from phalanx.cli.root import main
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.layouts.layout import layout_from_json, parse_layout
from tests.planned import planned


@pytest.fixture(autouse=True)
def _own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def typed(capsys):
    def run(*words):
        code = main(["plan", *words])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return run


def test_full_training_of_70b_on_eight_a100_is_refused_with_what_would_fit(typed):
    code, out, _ = typed("llama-2-70b", "--gpus", "a100-80gb:8", "--json")
    found = json.loads(out)
    assert code == 1
    assert (found["fits"], found["layouts"]) == (False, [])
    assert "1,104 GB" in found["reason"]  # 16 bytes for each of 69.0B parameters
    assert "8 x a100-sxm4-80gb have 640 GiB = 687 GB" in found["reason"]
    assert any("--method lora" in text for text in found["smallest"])
    assert any("--gpus 2xa100-sxm4-80gb:8" in text for text in found["smallest"])


def test_lora_of_70b_at_tp4_dp2_fits_with_time_and_cost(typed):
    code, out, _ = typed(
        "llama-2-70b",
        "--gpus",
        "a100-80gb:8",
        "--method",
        "lora",
        "--layout",
        "tp=4,dp=2",
        "--tokens",
        "100M",
        "--json",
    )
    assert code == 0
    best = json.loads(out)["layouts"][0]
    assert layout_from_json(best["layout"]).ranks == 8
    assert best["memory"]["room_bytes"] > 0
    assert best["train"]["low_s"] < best["train"]["mid_s"] < best["train"]["high_s"]
    assert best["usd"]["mid"] == pytest.approx(best["gpu_hours"]["mid"] * 3.4309)
    assert sum(best["step"]["items"].values()) == pytest.approx(best["step"]["mid_s"])
    assert sum(best["memory"]["items"].values()) == pytest.approx(best["memory"]["total_bytes"])


def test_eight_gpus_give_seven_to_eight_times_one_like_for_like():
    one = planned("llama-2-70b", "a100-80gb:1", method="qlora", global_batch="64", layout="mbs=4,recompute=full")
    eight = planned("llama-2-70b", "a100-80gb:8", method="qlora", global_batch="64", layout="dp=8,mbs=4,recompute=full")
    assert 7.0 <= eight.layouts[0].tokens_per_s / one.layouts[0].tokens_per_s <= 8.0


def test_saved_answer_is_what_run_takes(typed, tmp_path):
    code, out, _ = typed("llama-3-8b", "--gpus", "2xh100:8", "--save", "best.json")
    assert code == 0
    text = parse_plan_option("best.json", str(tmp_path))
    assert f"next: phalanx run --plan {text} -- python train.py" in out
    job = spec_from_mapping({"run": "python train.py", "plan": text}, workdir="/w")
    assert job.role.gpus.total == 16
    second = json.loads((tmp_path / "best.json").read_text())["layouts"][1]
    assert parse_layout(str(parse_plan_option("best.json#2", str(tmp_path)))) == layout_from_json(second["layout"])


def test_layouts_are_best_first_and_the_others_say_why():
    answer = planned("llama-3-8b", "2xh100:8")
    steps = [one.step_s.mid for one in answer.layouts]
    assert len(steps) > 1
    assert all(one.why for one in (*answer.layouts, *answer.losers))
    assert all(one.free_bytes > 0 for one in answer.layouts)
    assert all(one.layout.ranks == 16 for one in answer.layouts)


def test_explain_shows_each_formula_with_its_numbers_and_source(typed):
    _, out, _ = typed("llama-3-70b", "--gpus", "4xh100:8", "--tokens", "300B", "--explain")
    lines = out.splitlines()
    assert "    N = L (2 d h k + 2 d g k + 3 d f) + embeddings + norms" in lines
    assert any("N = 70,553,706,496" in line for line in lines)
    assert any("Kaplan" in line for line in lines)
    for one in planned("llama-3-70b", "4xh100:8", tokens="300B").formulas:
        assert one.symbols
        assert one.numbers
        assert one.source, one.name


def test_mixture_says_what_one_token_visits(typed):
    assert "46.7B parameters, 12.9B active" in typed("mixtral-8x7b", "--gpus", "2xh100:8")[1].replace("\n", " ")


def test_picture_is_drawn_of_what_fits_and_of_what_does_not(typed, tmp_path):
    assert typed("llama-3-8b", "--gpus", "h100:8", "--plot", "fits.svg")[0] == 0
    assert "One step of" in (tmp_path / "fits.svg").read_text()
    assert typed("llama-2-70b", "--gpus", "a100-80gb:8", "--plot", "not.html")[0] == 1
    assert "One step of" not in (tmp_path / "not.html").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--layout", "tp=16,dp=2"), "8 key-value heads cannot be shared by tp=16 ranks"),
        (("--layout", "tp=3,dp=8"), "is for 24 ranks, but the plan is for 32 GPUs"),
        (
            ("--layout", "fsdp=32", "--global-batch", "7"),
            "global batch 7 is not divisible by 32 data-parallel ranks",
        ),
        (("--layout", "pp=32,accumulate=1024,vpp=3"), "80 layers are fewer than the 96 chunks"),
        (("--layout", "fsdp=32,precision=bf16", "--precision", "fp8"), "fp8 contradicts bf16 in the layout"),
    ],
)
def test_layout_that_cannot_be_is_one_line(typed, words, told):
    code, out, error = typed("llama-3-70b", "--gpus", "4xh100:8", *words)
    assert (code, out) == (64, "")
    assert told in error
    assert error.count("\n") == 1


def test_layout_at_the_edge_of_the_memory_may_fit_and_says_how_sure_that_is(typed):
    words = ("--gpus", "2048xh100:8", "--seq", "8192", "--global-batch", "2048", "--stack", "megatron-core")
    code, out, _ = typed("llama-3.1-405b", *words, "--layout", "tp=8,pp=16,fsdp=128,zero=1,sp=1")
    assert code == 0
    assert "sp=1 may fit: " in out
    assert "try a short run first" in " ".join(out.split())


def test_layout_that_does_not_fit_leads_to_the_one_that_does(typed):
    code, out, _ = typed("llama-3-8b", "--gpus", "h100:8", "--layout", "dp=8")
    assert code == 1
    assert "another layout on these 8 GPUs" in out
    assert out.endswith("next: phalanx plan llama-3-8b --gpus h100:8\n")


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "h100:8", "--method", "dpo", "--seq", "8192", "--optimizer", "adamw8bit"),
        ("--gpus", "h100:1", "--seq", "1024", "--offload", "optimizer", "--global-batch", "64"),
        ("--gpus", "7xh100:8", "--seq", "1024", "--global-batch", "2"),
    ],
)
def test_the_next_command_has_the_stated_options_and_fits(typed, words):
    code, out, _ = typed("llama-3-70b", *words)
    assert code == 1
    following = out.rpartition("next: phalanx plan ")[2].split()
    pairs = set(itertools.pairwise(following))
    wanted = set(zip(words[::2], words[1::2], strict=True))
    assert {pair for pair in wanted if pair[0] not in {"--gpus", "--method", "--global-batch"}} <= pairs
    code, out, _ = typed(*following)
    assert (code, "fits;" in out) == (0, True)
    assert ("global batch not stated" in out) is ("--global-batch" not in words)


def test_nothing_is_proposed_where_nothing_would_do(typed, tmp_path):
    (tmp_path / "huge.json").write_text(
        '{"model_type":"llama","hidden_size":10000000,"num_attention_heads":1,"num_hidden_layers":10000,'
        '"intermediate_size":10000000,"vocab_size":10000000}'
    )
    code, out, _ = typed("huge.json", "--gpus", "h100:8")
    assert code == 1
    assert "what would fit" not in out


def test_explained_gathering_sends_what_the_step_is_counted_with(typed):
    words = ("--gpus", "h100:8", "--stack", "fsdp2-compile", "--explain", "--json")
    sent = []
    for precision in ("bf16", "fp32"):
        _, out, _ = typed("llama-3-8b", *words, "--layout", f"fsdp=8,precision={precision}")
        sent += [one["numbers"] for one in json.loads(out)["formulas"] if one["name"] == "sharded parameters"]
    assert "n 436 MB a layer" in sent[0]
    assert "n 872 MB a layer" in sent[1]


def test_explained_mfu_is_the_one_that_is_planned(typed):
    for words in (("--precision", "fp8"), ("--method", "lora")):
        _, out, _ = typed("llama-3-8b", "--gpus", "h100:8", "--explain", "--json", *words)
        found = json.loads(out)
        (numbers,) = (one["numbers"] for one in found["formulas"] if one["name"] == "MFU")
        told = re.match(r"([\d.,]+) GFLOP x ([\d,]+) /", numbers)
        assert told is not None
        work, rate = told.groups()
        mfu = float(work.replace(",", "")) * 1e9 * float(rate.replace(",", "")) / (8 * 989e12)
        assert mfu == pytest.approx(found["layouts"][0]["mfu"], rel=0.03)


def test_learned_positions_bound_the_sequence(typed):
    assert "sequence 1024" in typed("gpt2", "--gpus", "h100:1")[1]
    assert (
        "gpt2 has position vectors for 1024 positions, not 2048"
        in typed("gpt2", "--gpus", "h100:1", "--seq", "2048")[2]
    )


# ---- the layout that everyone knows ---------------------------------------------------------------------------------


def test_fsdp_over_all_gpus_stands_beside_the_best(typed):
    _, out, _ = typed("llama-3-8b", "--gpus", "2xh100:8", "--json")
    found = json.loads(out)
    simple = found["simple"]
    assert simple["fits"] is True
    assert simple["text"].startswith("fsdp=16")
    assert simple["layout"]["zero"] == 3
    assert simple["step"]["mid_s"] >= found["layouts"][0]["step"]["mid_s"]
    assert "slower" in simple["why"]
    _, page, _ = typed("llama-3-8b", "--gpus", "2xh100:8")
    assert f"simple layout {simple['text']}: " in page


def test_a_program_without_zero_3_stands_beside_its_simple_layout_too(typed):
    _, out, _ = typed("llama-3-8b", "--gpus", "2xh100:8", "--stack", "megatron-core", "--json")
    assert json.loads(out)["simple"]["layout"]["zero"] == 1


@pytest.mark.parametrize("words", [(), ("--method", "lora"), ("--method", "dpo"), ("--method", "grpo")])
def test_an_unstated_batch_divides_among_any_number_of_gpus(typed, words):
    _, out, _ = typed("qwen3-0.6b", "--gpus", "h100:7", "--json", *words)
    found = json.loads(out)
    assert found["asked"]["global_batch"] % 7 == 0
    assert found["simple"]["text"].startswith("fsdp=7")


def test_nemo_rl_has_one_run_of_layers_in_a_stage_and_recomputes_all_or_nothing(typed):
    _, out, _ = typed("llama-3-70b", "--gpus", "4xh100:8", "--method", "grpo", "--stack", "nemo-rl", "--json")
    layouts = [one["layout"] for one in json.loads(out)["layouts"]]
    assert layouts
    assert {one["interleave"] for one in layouts} == {1}
    assert {one["recompute"] for one in layouts} <= {"none", "full"}


def test_a_simple_layout_that_does_not_fit_says_what_is_too_large(typed):
    _, out, _ = typed("llama-3-70b", "--gpus", "h100:8", "--json")
    simple = json.loads(out)["simple"]
    assert simple["fits"] is False
    assert "usable" in simple["why"]


def test_where_the_best_is_the_simple_layout_the_page_says_so(typed):
    _, page, _ = typed("llama-3.2-1b", "--gpus", "h100:2", "--top", "1")
    assert "simple layout fsdp=2" in page


@pytest.mark.parametrize(
    "words",
    [("--gpus", "h100:1"), ("--gpus", "h100:8", "--layout", "tp=8"), ("--gpus", "h100:8", "--global-batch", "4")],
)
def test_no_simple_layout_for_one_gpu_a_given_one_or_a_small_batch(typed, words):
    _, out, _ = typed("qwen3-0.6b", *words, "--json")
    assert json.loads(out)["simple"] is None
