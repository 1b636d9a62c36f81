"""The planner beside published training runs; the bounds are those of benchmarks/ranges/planner.json."""

import csv
import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

import benchmarks.planner
from benchmarks.adapters_gpu import GROUPS, write_rows
from benchmarks.interval_spreads import HELD, needed_spread
from benchmarks.planner import (
    OWN_RUNS,
    RANGES,
    public_runs,
    refuses,
    score,
    summary,
)
from benchmarks.published_runs import read_runs
from phalanx.core.work.layouts.layout import parse_layout
from phalanx.planner.cost.memory import MemoryItem, estimate_memory
from phalanx.planner.cost.training_task import TrainingMethod, TrainingTask
from phalanx.planner.facts.coefficient_table import (
    coefficients,
    find_stack_name,
    stacks,
)
from phalanx.planner.facts.gpus import find_gpu
from phalanx.planner.facts.model_argument import parse_model_argument

PUBLIC = public_runs()
HEADER = (
    "row_id,source,framework,model,layers,hidden,heads,kv_heads,head_dim,ffn,gated,vocab,tied,experts,topk,moe_ffn,shared_ffn,"
    "dense_layers,mla,seq,gbs,gpu,n_gpus,gpus_per_node,nic_gbps_per_gpu,tp,sp,pp,vpp,dp,cp,ep,zero,mbs,recompute,flash,precision,"
    "iter_time_s,mem_gb,notes"
)
DENSE = "1,ours,FSDP2 (torchtitan),llama3-8b,32,4096,32,8,128,14336,1,128256,0,0,0,0,0,0,0,8192,16,H100,8,8,400,1,0,1,1,8,1,1,3,2,selective-op,1,bf16,2.4,,"
MIXED = "2,ours,Megatron-Core,mixtral,32,4096,32,8,128,14336,1,32000,0,8,2,14336,0,0,0,4096,256,B200,64,8,400,1,0,4,8,16,1,8,1,1,none,1,fp8,1.5,,"


@pytest.fixture(scope="module")
def figures():
    if PUBLIC is None:
        pytest.skip("the published runs are not beside the checkout (../shared) nor at PHALANX_SHARED")
    runs, wrong = read_runs(PUBLIC)
    assert wrong == []
    table = coefficients()
    return summary(score(runs, table, {run.stack for run in runs}), [], table)


@pytest.fixture(scope="module")
def bounds():
    return {name: one["bound"] for name, one in json.loads(RANGES.read_text(encoding="utf-8")).items()}


def test_step_times_are_as_near_as_promised(figures, bounds):
    assert figures["rows"] == 475
    assert figures["mape"] <= bounds["mape"]


def test_memory_is_as_near_as_promised(figures, bounds):
    assert figures["memory_rows"] == 22
    assert figures["memory_mape"] <= bounds["memory_mape"]


def test_nothing_that_ran_is_refused(figures):
    assert figures["refused_that_ran"] == 0


def test_other_tools_are_farther_off_on_their_own_rows(figures):
    for peer in figures["peers"].values():
        assert peer["ours"] < peer["theirs"]


def test_a_file_of_other_runs_is_read_with_mixtures_and_newer_devices(tmp_path):
    path = tmp_path / "ours.csv"
    path.write_text(f"{HEADER}\n{DENSE}\n{MIXED}\n")
    runs, wrong = read_runs(path)
    assert wrong == []
    assert [run.machine.gpu.name[:4] for run in runs] == ["h100", "b200"]
    mixture = runs[1].task.model.mixture
    assert mixture is not None
    assert mixture.experts == 8
    table = coefficients()
    figures = summary(score(runs, table, {"fsdp2-compile"}), [], table)
    assert set(figures["mape_by_source"]) == {"ours"}


def test_a_row_that_cannot_be_read_is_named_and_the_others_count(tmp_path):
    path = tmp_path / "ours.csv"
    path.write_text("\n".join([HEADER, DENSE, DENSE.replace("H100", "K9000")]) + "\n")
    runs, wrong = read_runs(path)
    assert len(runs) == 1
    assert "line 3" in wrong[0]
    assert "K9000" in wrong[0].replace("k9000", "K9000")


def test_few_columns_are_enough_and_words_for_nothing_are_no_numbers(tmp_path):
    path = tmp_path / "ours.csv"
    path.write_text(
        "model,layers,hidden,heads,ffn,vocab,seq,gbs,gpu,n_gpus,tp,vpp,flash,iter_time_s,oom\n"
        "a,32,4096,32,14336,128256,8192,16,GB200,16,2,n/a,true,2.4,\n"
        "b,32,4096,32,14336,128256,8192,16,RTX 3090,1,-,none,yes,,OOM\n"
    )
    runs, wrong = read_runs(path)
    assert wrong == []
    assert (runs[0].layout.data, runs[0].layout.tensor, runs[0].stack) == (8, 2, "generic")
    assert runs[0].machine.network_bytes_per_s > 1e9  # of the usual server: the row does not say, and two nodes need it
    assert [run.failed for run in runs] == [False, True]
    table = coefficients()
    figures = summary(score(runs, table, set()), [], table)
    assert (figures["rows"], figures["refused_that_ran"], figures["accepted_that_failed"]) == (2, 0, 0)


def test_a_run_whose_recomputation_is_not_stated_is_refused_only_if_none_makes_it_fit(tmp_path):
    path = tmp_path / "ours.csv"
    row = DENSE.replace(",2,selective-op,", ",3,{},").replace(",8192,16,", ",8192,24,")
    path.write_text("\n".join([HEADER, row.format("none"), row.format(""), row.format("full")]) + "\n")
    runs, wrong = read_runs(path)
    assert wrong == []
    assert [refuses(run, stacks()[run.stack]) for run in runs] == [True, False, False]


def test_a_run_whose_sharding_is_not_stated_is_refused_only_if_none_makes_it_fit(tmp_path):
    path = tmp_path / "ours.csv"
    row = DENSE.replace(",8,1,1,3,2,", ",8,1,1,{},2,")
    path.write_text("\n".join([HEADER, row.format("0"), row.format("")]) + "\n")
    runs, wrong = read_runs(path)
    assert wrong == []
    assert [refuses(run, stacks()[run.stack]) for run in runs] == [True, False]


def test_published_pretrainings_name_their_source_and_hold_every_kind_of_gpu():
    runs, wrong = read_runs(OWN_RUNS)
    assert wrong == []
    with OWN_RUNS.open(newline="") as file:
        assert all(row["source_ref"] for row in csv.DictReader(file))
    table = coefficients()
    figures = summary(score(runs, table, {run.stack for run in runs}), [], table)
    assert figures["mape_by_kind"]["dense"] < 0.10
    assert figures["mape_by_kind"]["mixture"] < 0.20


def test_memory_of_new_programs_is_as_near_as_promised(bounds):
    runs, _ = read_runs(OWN_RUNS)
    figures = summary(score(runs, coefficients(), {run.stack for run in runs}), [], coefficients())
    assert figures["memory_rows"] == 16
    assert figures["memory_mape"] <= bounds["memory_mape"]


# Peak of allocated memory in GiB, H200: github:KempnerInstitute/KempnerForge benchmarks/weak_scaling_160gpu/README.md (commit e9f9189).
# No coefficient and no fact of the stack was chosen by these rows.
THIRTEEN = "layers=40,hidden=5120,heads=40,kv_heads=8,ffn=17920,vocab=128256"
UNSEEN = [
    *((THIRTEEN, shards, 4, gib) for shards, gib in ((2, 45.0), (8, 36.2), (16, 34.8), (32, 34.0), (40, 33.9))),
    *(
        ("llama-3-70b", shards, 2, gib)
        for shards, gib in ((2, 128.5), (8, 93.2), (16, 86.8), (24, 84.6), (32, 83.6), (40, 82.9))
    ),
]


@pytest.mark.parametrize(("model", "shards", "micro", "gib"), UNSEEN)
def test_memory_of_runs_that_nothing_was_chosen_by(model, shards, micro, gib):
    layout = parse_layout(f"tp=4,fsdp={shards},mbs={micro},accumulate=4,sp=1,recompute=full")
    task = TrainingTask(model=parse_model_argument(model), seq=4096)
    found = estimate_memory(task, layout, find_gpu("h200").gpu, stacks()["kempnerforge"])
    allocated = found.total_bytes - found.items[MemoryItem.OTHER]
    assert allocated / 2**30 == pytest.approx(gib, rel=0.06)


def test_whole_gradients_accumulate_only_where_there_are_several_micro_batches():
    task = TrainingTask(model=parse_model_argument("llama-3-70b"), seq=4096)
    several, one = (
        estimate_memory(
            task, parse_layout(f"fsdp=32,accumulate={count}"), find_gpu("h200").gpu, stacks()["kempnerforge"]
        )
        for count in (4, 1)
    )
    assert several.items[MemoryItem.GRADIENTS] == pytest.approx(4.0 * task.model.parameters, rel=0.001)
    assert one.items[MemoryItem.GRADIENTS] == pytest.approx(2.0 * task.model.parameters / 32, rel=0.001)


def test_programs_are_told_apart_by_name_and_by_their_compiler(tmp_path):
    path = tmp_path / "ours.csv"
    names = ("FSDP2 (torchtitan)", "torchtitan main", "KempnerForge (FSDP2)")
    rows = [DENSE.replace("FSDP2 (torchtitan)", name) for name in names]
    path.write_text("\n".join([HEADER, *rows, *(f"{row}eager" for row in rows)]) + "\n")
    runs, wrong = read_runs(path)
    assert wrong == []
    assert [run.stack for run in runs] == [
        "fsdp2-compile",
        "torchtitan",
        "kempnerforge",
        "fsdp2-eager",
        "fsdp2-eager",
        "kempnerforge-eager",
    ]


def test_the_spread_between_sources_is_the_least_that_holds_four_of_five_rows():
    runs, _ = read_runs(OWN_RUNS)
    scores = score(runs, coefficients(), {run.stack for run in runs})
    needed = needed_spread(scores)
    inside = [
        abs(math.log1p(one.error)) <= 1.2816 * math.sqrt(one.item_variance + needed**2) * (1.0 + 1e-9) for one in scores
    ]
    weights = [1.0 / math.sqrt(sum(other.run.source == one.run.source for other in scores)) for one in scores]
    held = sum(weight for weight, kept in zip(weights, inside, strict=True) if kept) / sum(weights)
    assert HELD <= held < HELD + 0.05
    assert needed_spread([]) == 0.0


TUNING = f"{HEADER},method,adapters,rank,oom"
ADAPTED = "1,ours,transformers,llama-2-7b,32,4096,32,32,128,11008,1,32000,0,0,0,0,0,0,0,512,8,A100,1,8,0,1,0,1,1,1,1,1,0,1,full,1,bf16,1.5,20.4,,lora,q v,8,0"


def test_adapters_are_read_with_their_matrices_and_rank(tmp_path):
    path = tmp_path / "ours.csv"
    path.write_text(
        f"{TUNING}\n{ADAPTED}\n{ADAPTED.replace('lora,q v,8', 'qlora,,')}\n{ADAPTED.replace(',lora,', ',dora,')}\n"
    )
    runs, wrong = read_runs(path)
    assert [run.task.method for run in runs] == [TrainingMethod.LORA, TrainingMethod.QLORA]
    assert runs[0].task.adapter_share * runs[0].task.model.parameters == pytest.approx(
        4_194_304
    )  # Lit-GPT prints it for this model
    assert "line 4" in wrong[0]
    assert "dora" in wrong[0]


def test_a_run_out_of_memory_counts_as_accepted_or_refused_and_not_in_the_error(tmp_path):
    path = tmp_path / "ours.csv"
    failed = ADAPTED.replace(",1.5,20.4,", ",,,").removesuffix("0") + "1"
    only_memory = ADAPTED.replace(",1.5,", ",,")
    path.write_text(
        f"{TUNING}\n{ADAPTED}\n{only_memory}\n{failed}\n{failed.replace(',512,8,A100', ',655360,8,A100')}\n"
    )
    runs, wrong = read_runs(path)
    assert wrong == []
    table = coefficients()
    figures = summary(score(runs, table, set()), [], table)
    assert (figures["rows"], figures["ran"], figures["failed"], figures["memory_rows"]) == (4, 2, 2, 2)
    assert figures["refused_that_ran"] == 0
    assert figures["accepted_that_failed"] == 1
    assert set(figures["mape_by_method"]) == {"lora"}
    assert figures["mape"] == pytest.approx(abs(figures["bias_by_source"]["ours"]))


def test_published_tunings_are_all_read_and_name_their_source():
    path = Path(benchmarks.planner.__file__).parent / "tuning_measured.csv"
    runs, wrong = read_runs(path)
    assert wrong == []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(runs)
    assert all(row["source_ref"] for row in rows)
    assert {run.task.method for run in runs} == set(TrainingMethod)
    table = coefficients()
    figures = summary(score(runs, table, set()), [], table)
    # Wider than 12 % for the two consumer GPUs of `answerai`, which were added: 29 % with LoRA and 17 % with QLoRA (docs/planner.md).
    assert max(figures["mape_by_method"][name] for name in ("lora", "qlora")) < 0.14
    on_data_center = [run for run in runs if run.source == "qwen-readme"]
    read = summary(score(on_data_center, table, set()), [], table)["mape_by_method"]
    assert max(read["lora"], read["qlora"]) < 0.12
    assert figures["memory_mape"] < 0.10
    assert max(figures["memory_mape_by_method"][name] for name in ("lora", "qlora")) < 0.10
    assert figures["refused_that_ran"] == 0
    assert figures["accepted_that_failed"] == figures["tight_that_failed"]  # none of them was said to fit


def test_memory_of_a_source_that_nothing_was_chosen_by():
    """Two GPUs of 24 GB, sharded, with adapters, with and without weights on the host: github:AnswerDotAI/fsdp_qlora benchmarks_03_2024.md."""
    runs = [run for run in read_runs(benchmarks.planner.TUNING)[0] if run.source == "answerai"]
    table = coefficients()
    figures = summary(score(runs, table, set()), [], table)
    assert (figures["memory_rows"], figures["refused_that_ran"]) == (24, 0)
    assert figures["memory_mape"] < 0.10


def test_cases_of_a_gpu_become_rows_that_the_planner_scores(tmp_path):
    case = {
        **{name: value for name, value in asdict(GROUPS[0]).items() if name != "shapes"},
        "gpu": "NVIDIA H100 80GB HBM3",
        "mbs": 1,
        "seq": 256,
    }
    cases = [
        {**case, "step_s": 0.2, "used_bytes": 20e9},
        {**case, "oom": True, "error": "out of memory"},
        {**case, "error": "time"},
        {**case, "compiled": True, "step_s": 0.1, "used_bytes": 20e9},
    ]
    lines, path = tmp_path / "cases.jsonl", tmp_path / "rows.csv"
    lines.write_text("".join(json.dumps(one) + "\n" for one in cases))
    assert write_rows(str(lines), str(path)) == 2
    runs, wrong = read_runs(path)
    assert wrong == []
    assert [(run.step_s, run.failed) for run in runs] == [(0.2, False), (None, True)]
    assert runs[0].memory_bytes == pytest.approx(20e9)
    assert runs[0].machine.gpu.name == "h100-sxm5-80gb"
    assert runs[0].stack == find_stack_name("transformers")
    assert {run.task.method for run in runs} == {TrainingMethod.LORA}
