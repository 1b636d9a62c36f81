"""The planner beside published training runs; the bounds are those of benchmarks/ranges/planner.json."""

import json

import pytest

from benchmarks.planner import RANGES, public_runs, score, summary
from benchmarks.published_runs import read_runs
from phalanx.planner.facts.coefficient_table import coefficients

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
