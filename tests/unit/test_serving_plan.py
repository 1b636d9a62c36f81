"""The inference planner: memory of keys and values, the simulated batch against closed forms, sizing, and the command."""

import json
import math

import pytest

from phalanx.cli.root import main
from phalanx.core.work.gpus import parse_gpus
from phalanx.planner.cost.machine import Gpu
from phalanx.planner.facts.machines import build_machine
from phalanx.planner.facts.models import find_model
from phalanx.planner.facts.serving_facts import find_serving_speed, serving_speeds
from phalanx.planner.serving.batch_simulation import BatchSimulation, RequestLoad
from phalanx.planner.serving.iteration_time import IterationTimer, matrix_rate
from phalanx.planner.serving.replica import ReplicaLayout, ServedModel, cache_room_bytes, cache_tokens
from phalanx.planner.serving.sizing import ServiceSizer, ServingTarget, candidate_layouts, percentile

SPEED = find_serving_speed("vllm")


def served(name, weights="bf16", cache="bf16"):
    shape = find_model(name)
    return ServedModel(shape=shape, weights=weights, cache=cache)


def gpu(words="h100:8"):
    return build_machine(parse_gpus(words)).gpu


def timer(name="llama-3-8b", tensor=1, weights="bf16", words="h100:8"):
    return IterationTimer(served(name, weights), gpu(words), ReplicaLayout(tensor=tensor), SPEED)


def load(**given):
    return RequestLoad(**{"users": 1, "prompt": 1000, "answer": 100, "requests": 1, **given})


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_grouped_queries_keep_two_vectors_of_each_key_value_head():
    assert served("llama-3-70b").context_bytes(1) == 2 * 80 * 8 * 128 * 2
    assert served("llama-2-7b", cache="fp8").context_bytes(1) == 2 * 32 * 32 * 128


def test_ranks_share_heads_and_hold_copies_beyond_them():
    model = served("llama-3-70b")
    assert model.context_bytes(10, 4) == model.context_bytes(10) / 4
    assert model.context_bytes(10, 16) == model.context_bytes(10, 8)


def test_latent_attention_keeps_one_vector_on_every_rank():
    model = served("deepseek-v3", "fp8")
    assert model.context_bytes(1) == 61 * (512 + 64) * 2
    assert model.context_bytes(1, 8) == model.context_bytes(1)


def test_a_window_bounds_the_cache_of_its_layers():
    model = served("gpt-oss-120b")
    layer = 2 * 8 * 64 * 2
    assert model.context_bytes(100) == 36 * layer * 100
    assert model.context_bytes(10_000) == layer * (18 * 10_000 + 18 * 128)


def test_weights_of_four_bits_leave_embeddings_in_sixteen():
    whole, packed = served("llama-3-8b"), served("llama-3-8b", "int4")
    assert whole.weight_bytes == 2 * whole.shape.parameters
    matrices = whole.shape.parameters - whole.unquantised_parameters
    assert packed.weight_bytes == pytest.approx(matrices * 4.25 / 8 + 2 * whole.unquantised_parameters)


def test_a_model_that_is_larger_than_the_gpu_has_no_room():
    model, layout = served("llama-3-70b"), ReplicaLayout()
    room = cache_room_bytes(model, layout, gpu().memory_bytes, share=0.9, overhead_bytes=2e9)
    assert room < 0
    assert cache_tokens(model, layout, room, 1000) == 0


# ---- time -----------------------------------------------------------------------------------------------------------


def test_one_request_is_bound_by_reading_the_weights():
    parts = timer().parts(1, 100)
    bound = 2 * served("llama-3-8b").shape.parameters / gpu().memory_bytes_per_s
    assert bound < parts.products < 1.5 * bound
    assert parts.communication == 0


def test_a_long_prompt_is_bound_by_products():
    parts = timer().parts(0, 0, 8000, 8000**2 / 2)
    least = 2 * 7e9 * 8000 / gpu().best_flops["bf16"]
    assert parts.products > least
    assert parts.products > 0.5 * parts.total_s


def test_ranks_divide_products_and_add_all_reduces():
    one, four = timer(tensor=1).parts(16, 1000), timer(tensor=4).parts(16, 1000)
    assert four.products < one.products / 3
    assert four.communication > 0


def test_few_tokens_visit_few_experts():
    mixture = timer("mixtral-8x7b", tensor=2)
    assert mixture.parts(1, 100).products < 0.5 * mixture.parts(256, 100).products


def test_an_unknown_precision_of_a_gpu_is_refused():
    with pytest.raises(KeyError):
        timer(weights="fp8", words="a100-80gb:8")


def test_a_best_rate_of_either_16_bit_format_counts_before_a_peak():
    h100 = gpu()
    assert "fp16" not in h100.best_flops
    assert matrix_rate(h100, SPEED, "fp16") == matrix_rate(h100, SPEED, "bf16") < h100.flops["fp16"]


def test_one_user_waits_for_one_prompt_and_then_for_each_token():
    clock = timer()
    found = BatchSimulation(clock, load(), cache_tokens=math.inf).run()
    assert found.ttft_s[0] == pytest.approx(clock.seconds(0, 0, 1000, 1000**2 / 2) + SPEED.request_s)
    assert found.tpot_s[0] == pytest.approx(clock.seconds(1, 1001 + 99 / 2), rel=0.01)
    assert found.output_tokens == 100


def test_prompts_longer_than_an_iteration_are_read_in_chunks():
    clock = timer()
    found = BatchSimulation(clock, load(prompt=20_000), cache_tokens=math.inf).run()
    whole = clock.seconds(0, 0, 20_000, 20_000**2 / 2)
    assert whole < found.ttft_s[0] < 1.1 * whole + SPEED.request_s


def test_requests_without_room_wait():
    clock = timer()
    both = load(users=2, requests=2, again=False)
    together = BatchSimulation(clock, both, cache_tokens=5000).run()
    apart = BatchSimulation(clock, both, cache_tokens=1100).run()
    assert together.running_max == 2
    assert apart.running_max == 1
    assert apart.ttft_s[1] > together.ttft_s[1] + 99 * clock.seconds(1, 1000)


def test_a_cache_that_holds_no_request_answers_none():
    assert BatchSimulation(timer(), load(), cache_tokens=10).run().ttft_s == ()


def test_little_s_law_holds_for_users_who_think():
    given = load(users=40, requests=2000, think_s=2.0, start_s=3.0, answer_spread=0.5)
    found = BatchSimulation(timer(), given, cache_tokens=math.inf).run()
    cycle = sum(found.ttft_s) / len(found.ttft_s) + 99 * sum(found.tpot_s) / len(found.tpot_s) + 2.0
    assert found.tokens_per_s == pytest.approx(40 * 100 / cycle, rel=0.05)


def test_the_same_seed_gives_the_same_outcome():
    given = load(users=8, requests=64, start_s=1.0, answer_spread=0.5)
    runs = [BatchSimulation(timer(), given, cache_tokens=math.inf).run() for _ in range(2)]
    assert runs[0] == runs[1]


def test_percentiles_are_ranks():
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.95) == 4.0
    assert percentile([], 0.5) == math.inf


# ---- sizing ---------------------------------------------------------------------------------------------------------


def sizer(name="llama-3-70b", tensor=4, words="h100:8", weights="bf16", **target):
    wanted = ServingTarget(**{"users": 200, "prompt": 2000, "answer": 500, "ttft_s": 0.5, **target})
    machine = build_machine(parse_gpus(words))
    return ServiceSizer(served(name, weights), machine, ReplicaLayout(tensor=tensor), SPEED, wanted)


def test_the_fewest_replicas_meet_the_target_and_one_less_does_not():
    one = sizer(users=400, tpot_s=0.04)
    found = one.size()
    assert found.replicas > 1
    assert one.figures(-(-400 // found.replicas)).meets(one.target)
    fewer = found.replicas - 1
    crowded = -(-400 // fewer)
    assert crowded > one.batch_max or not one.figures(crowded).meets(one.target)


def test_more_users_and_tighter_bounds_need_no_fewer_gpus():
    counts = [sizer(users=users).size().replicas for users in (50, 200, 800)]
    assert counts == sorted(counts)
    bounds = [sizer(tpot_s=each).size().replicas for each in (0.1, 0.05, 0.03)]
    assert bounds == sorted(bounds)


def test_the_interval_holds_the_number():
    found = sizer(tpot_s=0.05).size()
    assert found.replicas_low <= found.replicas
    assert found.replicas_high is None or found.replicas <= found.replicas_high


def test_what_no_number_of_replicas_can_do_is_named():
    assert "do not fit" in sizer(tensor=1).size().why_not
    assert "to its first token" in sizer(ttft_s=0.01).size().why_not
    assert "per token" in sizer(tpot_s=0.001).size().why_not


def test_reading_elsewhere_frees_decoding_from_prompts():
    one = sizer(users=100, prompt=8000, answer=200, ttft_s=4.0, tpot_s=0.03)
    whole, split = one.size(), one.size_split()
    assert split is not None
    assert split.readers >= 1
    assert split.replicas <= whole.replicas
    assert split.figures.tpot_p95_s <= 0.03


def test_answers_of_one_token_have_nothing_to_decode():
    one = sizer(answer=1)
    assert one.size().replicas >= 1
    assert one.size_split() is None


def test_layouts_divide_heads_and_stay_in_a_node():
    layouts = candidate_layouts(served("llama-3-70b"), build_machine(parse_gpus("h100:8")))
    assert [(one.tensor, one.stages) for one in layouts] == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4)]


def test_every_engine_has_all_coefficients():
    assert {"vllm", "tensorrt-llm", "lmdeploy"} <= set(serving_speeds())
    assert all(set(one.spreads) == {"throughput", "tpot", "ttft"} for one in serving_speeds().values())
    assert isinstance(gpu(), Gpu)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main(["plan", *words])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return run


ASKED = ("llama-3-70b", "--serve", "--users", "200", "--in", "2000", "--out", "500", "--ttft", "500ms")


def test_the_first_sentence_is_the_number_of_gpus(typed):
    code, out, _ = typed(*ASKED, "--gpus", "h100")
    assert code == 0
    assert out.startswith("8 x h100-sxm5-80gb: 2 replicas of tp=4, bf16 weights, first token in ")
    assert "phalanx serve model DIR --gpus h100:4 --replicas 2, with DIR the folder of the 16-bit weights" in out
    assert "with fp8 weights: 4 x h100-sxm5-80gb" in out


def test_json_has_memory_times_and_cost_with_intervals(typed):
    _, out, _ = typed(*ASKED, "--gpus", "h100", "--json")
    found = json.loads(out)
    best = found["layouts"][0]
    assert found["fits"] is True
    assert found["gpus"] == best["gpus"] == best["replicas"] * best["tensor"] * best["pipeline"]
    assert best["kv_bytes_per_token"] == 327_680
    assert best["ttft_p95_s"]["low"] < best["ttft_p95_s"]["mid"] <= 0.5
    price = 6.88 * best["gpus"] / 3600 / best["output_tokens_per_s"]["mid"] * 1e6
    assert best["usd_per_million_output_tokens"] == pytest.approx(price)
    assert found["next"].startswith("phalanx serve model ")


def test_without_gpus_all_kinds_with_a_price_are_compared(typed):
    _, out, _ = typed(*ASKED, "--json")
    found = json.loads(out)
    kinds = [one["gpu"] for one in found["layouts"]]
    assert len(set(kinds)) == len(kinds) > 1
    assert any("compared the" in note for note in found["notes"])


def test_formulas_have_numbers_and_sources(typed):
    _, out, _ = typed(*ASKED, "--gpus", "h100", "--explain")
    for words in ("2 x 80 x 8 x 128 x 2 = 327.7 kB", "largest batch", "one prompt alone", "80 % interval", "AWS"):
        assert words in out


def test_a_folder_of_weights_makes_a_command_that_runs_as_it_stands(typed, tmp_path):
    (tmp_path / "mine").mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    _, out, _ = typed("mine", "--serve", "--users", "10", "--gpus", "h100")
    assert out.rstrip().endswith("next: phalanx serve model mine --gpus h100:1 --replicas 1")


def test_too_few_gpus_are_said_with_the_number_and_what_to_ask(typed):
    code, out, _ = typed("llama-3-70b", "--serve", "--users", "2000", "--gpus", "h100:8")
    assert code == 1
    assert "more than the 8 that were named" in out
    assert "next: phalanx plan llama-3-70b --serve --users 2000 --in 1000 --out 300 --ttft 1s --gpus h100\n" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--serve",), "--serve needs the number of users"),
        (("--serve", "--users", "0"), "users: '0' is not a positive integer"),
        (("--serve", "--users", "many"), "users: 'many' is not a positive integer"),
        (("--serve", "--users", "9000000"), "users: 9000000 is more than 100,000"),
        (("--serve", "--users", "5", "--ttft", "5"), "ttft: '5' is not a time"),
        (("--serve", "--users", "5", "--ttft", "0s"), "ttft: it must be above 0"),
        (("--serve", "--users", "5", "--tokens", "3B"), "--tokens and --serve exclude each other"),
        (("--serve", "--users", "5", "--method", "lora"), "--method and --serve exclude each other"),
        (("--serve", "--users", "5", "--mean-length", "200"), "--mean-length and --serve exclude each other"),
        (("--serve", "--users", "5", "--packing", "packed"), "--packing and --serve exclude each other"),
        (("--serve", "--users", "5", "--group", "8"), "--group and --serve exclude each other"),
        (("--serve", "--users", "5", "--updates", "2"), "--updates and --serve exclude each other"),
        (("--serve", "--users", "5", "--host-memory", "64GiB"), "--host-memory and --serve exclude each other"),
        (("--serve", "--users", "5", "--precision", "fp32"), "precision: 'fp32' must be one of"),
        (("--serve", "--users", "5", "--precision", "fp8", "--gpus", "v100"), "does not support fp8"),
        (
            ("--serve", "--users", "5", "--precision", "bf16", "--gpus", "t4"),
            "t4-16gb does not support bf16 (--precision fp16",
        ),
        (
            ("--serve", "--users", "5", "--precision", "nvfp4", "--gpus", "h100"),
            "does not support nvfp4 (--precision int4",
        ),
        (("--serve", "--users", "5", "--gpus", "h1000"), "unknown GPU 'h1000'"),
        (("--serve", "--users", "5", "--gpus", "h100|a100:4"), "gpus"),
        (("--users", "5", "--gpus", "h100:8"), "--users needs --serve"),
        (("--gpus", "h100"), "'h100' is not a number of GPUs"),
    ],
)
def test_nonsense_gets_one_line(typed, words, said):
    code, out, err = typed("llama-3-8b", *words)
    assert code not in (0, 1)
    assert out == ""
    assert said in err
    assert err.count("phalanx: error:") == 1


@pytest.mark.parametrize(("gpu_word", "precision"), [("b200", "nvfp4"), ("h100", "mxfp4"), ("b200", "mxfp4")])
def test_formats_of_four_bits_are_planned_where_the_gpu_has_them(typed, gpu_word, precision):
    code, out, _ = typed("gpt-oss-120b", "--serve", "--users", "20", "--gpus", gpu_word, "--precision", precision)
    assert code == 0
    assert f"{precision} weights" in out
    assert f"with DIR the folder of the {precision} weights" in out
    assert "no published row has 4-bit weights" in out


def test_the_published_checkpoint_of_gpt_oss_is_as_large_as_its_file():
    # openai/gpt-oss-120b: 65.2 GB of safetensors (its attention stays in 16 bits, which the plan does not know)
    assert served("gpt-oss-120b", "mxfp4").weight_bytes == pytest.approx(65.2e9, rel=0.05)


def test_a_gpu_without_bf16_serves_16_bits_as_fp16(typed):
    code, out, _ = typed("llama-3.2-1b", "--serve", "--users", "5", "--gpus", "t4")
    assert code == 0
    assert "fp16 weights" in out
    assert "bf16 weights" not in out
    assert "t4-16gb has no bf16: the engine needs --dtype half" in out


def test_very_long_prompts_are_sized_from_fewer_requests():
    long = sizer("llama-3-8b", 1, prompt=1_000_000, answer=100, users=4, ttft_s=1e4)
    assert long.batch_max < 1
    held = sizer("gemma-2-2b", 1, prompt=400_000, answer=100, users=100, ttft_s=1e5)
    assert held.size().replicas >= 1


def test_positions_bound_the_length(typed):
    code, _, err = typed("gpt2", "--serve", "--users", "5", "--in", "2000")
    assert code not in (0, 1)
    assert "1024 positions" in err
