"""`phalanx serve model` without a head: which files a model has, whether it fits, and the command line of each engine."""

# A head of canned answers stands in for a client.
# mypy: disable-error-code="arg-type"

import json
import os
import shlex
import subprocess

import msgspec
import pytest

from phalanx.cli.serve.inference_engines import (
    ENGINES,
    WeightsFormat,
    engine_command,
    engines_for,
    own_command,
)
from phalanx.cli.serve.model import choose_engine, service_name
from phalanx.cli.serve.model_files import ModelFiles, model_files, read_model_files
from phalanx.cli.serve.model_gpus import GpuModel, fitting_shape
from phalanx.cli.serve.model_source import find_job_model, source_text
from phalanx.cli.serve.node_probe import _SCRIPT, NodeAnswer, parse_answer
from phalanx.core.errors import BadFile, BadRequest, Conflict, NeverFits, NotFound
from phalanx.core.units import GIB
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.services.model_memory import ModelNeeds, fewest_gpus, fits
from phalanx.wire.api.jobs import JobDetail
from phalanx.wire.api.output import FileEntry, FilesReply

VLLM, SGLANG, LLAMA = ENGINES
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
PARTS = {"model-00001-of-00002.safetensors": 5 * GIB, "model-00002-of-00002.safetensors": 10 * GIB}
A_70B = ModelNeeds(weights_bytes=131 * GIB, kv_bytes=320 << 10, kv_parts=8, heads=64, tokens_max=131072)
H100, H200, L4 = (
    GpuModel(name=name, memory_bytes=gib * GIB, nodes=(f"{name}-0",))
    for name, gib in (("h100", 80), ("h200", 141), ("l4", 24))
)
VIRTUAL = GpuModel(name="virtual", memory_bytes=0, nodes=("n0",))


# ---- the files of a model -------------------------------------------------------------------------------------------


def test_weights_are_counted_once_and_the_cache_follows_from_the_config():
    found = ModelFiles(path="/m", sizes={**PARTS, "consolidated.safetensors": 15 * GIB, "a.txt": 1}, config=LLAMA_8B)
    assert found.formats() == [WeightsFormat.SAFETENSORS]
    assert found.weights(WeightsFormat.SAFETENSORS) == ("/m", 15 * GIB)
    needs = found.needs(WeightsFormat.SAFETENSORS)
    assert (needs.weights_bytes, needs.kv_bytes, needs.kv_parts, needs.heads) == (15 * GIB, 131072, 8, 32)
    assert needs.cache_bytes == GIB, "8192 tokens of 128 KiB"


def test_short_models_need_no_longer_text_than_they_take():
    found = ModelFiles(path="/m", sizes=PARTS, config={**LLAMA_8B, "max_position_embeddings": 2048})
    assert found.needs(WeightsFormat.SAFETENSORS).floor_tokens == 2048


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "tomorrow", "num_attention_heads": 12},
        {"architectures": ["X"]},
        {"num_attention_heads": 1 << 70},
        {"num_attention_heads": True},
        {"num_attention_heads": -4},
    ],
)
def test_model_of_an_unknown_kind_is_judged_by_its_weights(config):
    needs = ModelFiles(path="/m", sizes=PARTS, config=config).needs(WeightsFormat.SAFETENSORS)
    assert (needs.weights_bytes, needs.cache_bytes, needs.heads) == (15 * GIB, 0, 12 * ("model_type" in config))


@pytest.mark.parametrize("sizes", [{}, {"a.txt": 1}, {"model.safetensors": 5}, {"mmproj-q8.gguf": 5}])
def test_folder_without_a_model_is_refused(sizes):
    with pytest.raises(BadFile, match="no weights"):
        ModelFiles(path="/m", sizes=sizes).formats()


def test_gguf_in_parts_is_one_model_and_of_several_one_must_be_named():
    parts = {f"big-0000{one}-of-00002.gguf": one for one in (1, 2)}
    found = ModelFiles(path="/m", sizes={**parts, "mmproj.gguf": 7})
    assert found.weights(WeightsFormat.GGUF) == ("/m/big-00001-of-00002.gguf", 3)
    with pytest.raises(BadRequest, match=r"2 models: big-00001-of-00002\.gguf, small\.gguf"):
        ModelFiles(path="/m", sizes={**parts, "small.gguf": 1}).weights(WeightsFormat.GGUF)


def test_models_are_read_from_a_folder_and_from_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "q4.gguf").write_bytes(b"123")
    found = read_model_files(str(tmp_path))
    assert found is not None
    assert found.formats() == [WeightsFormat.SAFETENSORS, WeightsFormat.GGUF]
    assert found.weights(WeightsFormat.SAFETENSORS) == (str(tmp_path), 5)
    one = read_model_files(str(tmp_path / "q4.gguf"))
    assert one is not None
    assert one.weights(WeightsFormat.GGUF) == (str(tmp_path / "q4.gguf"), 3)
    assert read_model_files(str(tmp_path / "none")) is None
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadFile, match="not a JSON object"):
            read_model_files(str(tmp_path))


# ---- what fits ------------------------------------------------------------------------------------------------------


def test_fewest_gpus_hold_weights_cache_and_what_the_engine_needs_besides():
    assert not fits(A_70B, 1, 141 * GIB, 0.9)
    assert fewest_gpus(A_70B, 80 * GIB, 0.9, splits_heads=True) == 2
    assert fewest_gpus(A_70B, 24 * GIB, 0.9, splits_heads=True) == 8, "7 do not divide 64 heads"
    assert fewest_gpus(A_70B, 24 * GIB, 0.9, splits_heads=False) == 7
    assert fewest_gpus(A_70B, 24 * GIB, 0.9, splits_heads=True, nodes=2) == 4
    assert fewest_gpus(A_70B, 2 * GIB, 0.9, splits_heads=True) == 0, "each GPU needs more than that besides"


def shape(gpus, *fleet, needs=A_70B, row=VLLM):
    found = fitting_shape(row, needs, None if gpus is None else parse_gpus(gpus), fleet)
    return found.text, found.gpus, found.nodes


def test_request_is_narrowed_to_the_models_of_gpu_that_are_large_enough():
    assert shape("2", H200, H100, L4) == ("h200,h100:2", 2, 1)
    assert shape("2", H200, H100) == ("2", 2, 1)
    assert shape("h100:2", H200, H100, L4) == ("h100:2", 2, 1)
    assert shape("2x4", H200, H100, L4) == ("2x4", 4, 2)
    assert shape("2", H100, VIRTUAL) == ("h100:2", 2, 1)


def test_without_a_request_a_replica_gets_the_fewest_that_fit():
    assert shape(None, H200, H100, L4) == ("h200,h100:2", 2, 1)
    assert shape(None, L4) == ("8", 8, 1)
    assert shape(None, VIRTUAL) == ("1", 1, 1), "of unknown memory"
    assert shape(None) == ("0", 0, 1), "a fleet of CPUs"


def test_model_that_does_not_fit_is_refused_with_the_smallest_number_that_does():
    with pytest.raises(
        NeverFits, match=r"131 GiB of weights and 2.5 GiB of cache for 8,192 tokens do not fit 4 x l4"
    ) as one:
        shape("l4:4", H100, L4)
    assert one.value.hint == "--gpus l4:8 is the smallest number that fits"
    with pytest.raises(NeverFits) as two:
        shape("2x1", L4)
    assert two.value.hint == "--gpus 2xl4:4 is the smallest number that fits"
    with pytest.raises(NeverFits, match="no number of the fleet's GPUs"):
        shape(None, GpuModel(name="old", memory_bytes=2 * GIB, nodes=("n0",)))


def test_heads_must_be_divided_for_engines_that_do():
    with pytest.raises(BadRequest, match="64 attention heads cannot be divided among 3 GPUs") as refused:
        shape("3", H100)
    assert refused.value.hint.startswith("--gpus 2,")
    assert shape("3", H100, row=LLAMA) == ("3", 3, 1)


@pytest.mark.parametrize(("gpus", "text"), [("1/2", "0.5"), ("0", "0"), ("20GiB", "20GiB")])
def test_parts_of_a_gpu_and_cpus_are_left_to_the_engine(gpus, text):
    assert shape(gpus, H100)[0] == text


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ENGINES, ids=lambda row: row.name)
def test_command_names_the_service_listens_on_its_port_everywhere_and_reports_to_no_one(row):
    text = engine_command(row, "/m/it's here", gpus=2, extra=["--x", "a b; rm"])
    words = shlex.split(text)
    assert words[0] == "exec"
    assert "/m/it's here" in words
    assert words[-2:] == ["--x", "a b; rm"]
    for pair in (["--host", "0.0.0.0"], ["--port", "$PORT"]):
        assert pair == words[words.index(pair[0]) :][:2]
    assert "$PHALANX_SERVICE" in words
    assert dict(row.env)["DO_NOT_TRACK"] == dict(row.env)["HF_HUB_OFFLINE"] == "1"
    spec = spec_from_mapping({"type": "service", "name": "m", "run": text, "ready": row.ready}, workdir="/")
    assert spec.role.script == text, "a shell starts it"


def test_parallel_words_follow_the_gpus_and_nodes():
    assert "--tensor-parallel-size 4" in engine_command(VLLM, "/m", gpus=4)
    assert "--nnodes" not in engine_command(VLLM, "/m", gpus=4)
    two = engine_command(VLLM, "/m", gpus=8, nodes=2)
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank $PHALANX_NODE_RANK" in two
    assert "--pp-size 2 --nnodes 2" in engine_command(SGLANG, "/m", gpus=8, nodes=2)
    assert engine_command(VLLM, "/m", gpus=1, sleeps=True).endswith("--enable-sleep-mode")
    assert [bool(one.sleep) for one in ENGINES] == [bool(one.wake) for one in ENGINES] == [True, False, False]


def test_own_command_is_filled_in_and_nothing_else_of_it_is_read_by_the_shell(tmp_path):
    text = own_command(["printf", "%s\n", "{model}", "--at=h:{port}/x", "{name}", "$(id);*", ""], "/m/a b")
    env = {"PATH": os.environ["PATH"], "PORT": "81", "PHALANX_SERVICE": "chat"}
    ran = subprocess.run(["/bin/sh", "-c", text], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n") == ["/m/a b", "--at=h:81/x", "chat", "$(id);*", "", ""]


def test_name_of_a_service_follows_from_the_folder():
    assert service_name("/models/Llama-3.1-8B-Instruct/") == "llama-3-1-8b-instruct"
    assert service_name("/models/SmolLM2.Q4_1.gguf") == "smollm2-q4-1"
    assert service_name("/models/7b") == "model-7b"
    assert service_name("/") == "model"
    assert len(service_name("/" + "x" * 200)) == 63


# ---- what a node answers --------------------------------------------------------------------------------------------


def test_node_lists_its_engines_and_the_files_of_the_model(tmp_path):
    tools, place = tmp_path / "bin", tmp_path / "it's a model"
    tools.mkdir()
    place.mkdir()
    for name in ("vllm", "llama-server"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    (place / "config.json").write_text(json.dumps(LLAMA_8B))
    (place / "model.safetensors").write_bytes(b"12345")
    (place / "two words.txt").write_bytes(b"1")
    (place / "a\nphalanx-probe engine sglang\nphalanx-probe end").write_bytes(b"1")  # a name that reads like an answer

    def ask(path):
        env = {"PATH": f"{tools}:{os.environ['PATH']}"}
        ran = subprocess.run(
            ["/bin/sh", "-c", _SCRIPT, "phalanx", path], env=env, capture_output=True, text=True, check=True
        )
        return parse_answer(f"a line of the module system\n{ran.stdout}", "n0", path)

    answer = ask(str(place))
    assert answer.engines == ("vllm", "llama.cpp")
    assert answer.files is not None
    assert answer.files.sizes["model.safetensors"] == 5
    assert answer.files.sizes["two words.txt"] == 1
    assert answer.files.needs(WeightsFormat.SAFETENSORS).heads == 32
    assert choose_engine(answer.files, answer) is VLLM
    assert ask(str(place / "none")).files is None
    with pytest.raises(Conflict, match="in full"):
        parse_answer("phalanx-probe engine vllm\n", "n0", "/m")


def test_engine_is_the_preferred_one_that_the_node_has_for_the_weights():
    both = model_files("/m", {**PARTS, "q4.gguf": 1}, json.dumps(LLAMA_8B))

    def chosen(*engines):
        return choose_engine(both, NodeAnswer(node="n0", engines=engines, files=both)).name

    assert chosen("llama.cpp", "sglang", "vllm") == "vllm"
    assert chosen("llama.cpp", "sglang") == "sglang"
    assert chosen("llama.cpp") == "llama.cpp"
    with pytest.raises(BadRequest, match="neither vllm nor sglang"):
        chosen()
    assert engines_for(WeightsFormat.GGUF) == (LLAMA,)


# ---- a model that a job wrote ---------------------------------------------------------------------------------------


class Outputs:
    """A head with one job: its files by folder."""

    def __init__(self, *files, state="succeeded", step=900):
        self.paths, self.state, self.step = files, state, step

    def job(self, job_id):
        progress = {"epoch": 1, "generation": 0, "step": self.step, "at_s": 0}
        view = {
            "id": job_id,
            "seq": 1,
            "name": "Tune",
            "state": self.state,
            "user": "ada",
            "project": "p",
            "queue": "q",
        }
        found = view | {"submit_s": 0, "output_dir": "/out/17-x", "progress": progress}
        return msgspec.convert({"job": found, "attempts": []}, JobDetail)

    def files(self, _job_id, path):
        below = [one[len(path) :].lstrip("/") for one in self.paths if not path or one.startswith(path + "/")]
        if path and not below:
            raise NotFound(f"{path!r}: no such file in the job's outputs")
        folders = sorted({one.partition("/")[0] for one in below if "/" in one})
        entries = [FileEntry(path=f"{path}/{one}".lstrip("/"), kind="folder") for one in folders]
        entries += [
            FileEntry(path=f"{path}/{one}".lstrip("/"), kind="file", size_bytes=5) for one in below if "/" not in one
        ]
        return FilesReply(path=path, entries=entries)


def hub(folder):
    return [f"{folder}/config.json", f"{folder}/model.safetensors"]


def source(head, word="17", folder=None):
    found = find_job_model(head, word, folder)
    return found.path, found.step


def test_model_of_a_job_is_the_one_of_its_highest_step():
    head = Outputs("log.txt", *hub("ckpt/checkpoint-500"), *hub("ckpt/checkpoint-1000"), "ckpt/checkpoint-2000/x.txt")
    assert source(head) == ("/out/17-x/ckpt/checkpoint-1000", 1000)
    assert source(head, "17:500") == ("/out/17-x/ckpt/checkpoint-500", 500)
    assert source(head, folder="ckpt/checkpoint-500") == ("/out/17-x/ckpt/checkpoint-500", 500)
    assert find_job_model(head, "17", None).size_bytes == 10
    labels = find_job_model(head, "17", None).labels("ab12")
    assert source_text(labels) == "of job 17, step 1000, sha256 ab12"
    assert source_text({}) == ""


def test_model_without_a_step_has_that_of_the_end_of_its_job():
    assert source(Outputs("model.gguf")) == ("/out/17-x", 900)
    assert source(Outputs(*hub("final"))) == ("/out/17-x/final", 900)
    assert source(Outputs(*hub("final"), state="failed")) == ("/out/17-x/final", None)


def test_job_without_one_model_to_choose_is_refused():
    for files in ((), ("a.txt",), ("config.json",), ("x.safetensors",)):
        with pytest.raises(NotFound, match="wrote no model to its outputs"):
            source(Outputs(*files))
    with pytest.raises(NotFound, match="no model of step 7"):
        source(Outputs(*hub("step-8")), "17:7")
    with pytest.raises(BadRequest, match="wrote 2 models: best, step-8"):
        source(Outputs(*hub("step-8"), *hub("best")))
    with pytest.raises(BadRequest, match="is not a step"):
        source(Outputs(*hub("step-8")), "17:last")
    with pytest.raises(NotFound, match="no such file"):
        source(Outputs(*hub("step-8")), folder="none")
