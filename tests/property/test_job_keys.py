"""The keys of a job give its spec again, straight, as JSON and as the YAML that `show --file` prints: any spec, any key of a job file."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, assignment, dict-item"

import json

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from phalanx.cli.jobs.request.job_file import parse_job_file
from phalanx.core.errors import PhalanxError
from phalanx.core.units import exact_duration, parse_duration_s
from phalanx.core.work.job_file.job_keys import job_keys
from phalanx.core.work.job_file.keys import KEY_KINDS
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.user_files.yaml_text import yaml_text
from tests.effort import examples, size

NOW_S = 1_795_000_000.0
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
LINE = st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), min_size=1, max_size=20).filter(
    str.strip
)
WORD = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
TIMES = st.sampled_from(["90m", "2h", "1-12:00:00", "0.25s", "1h0.1s", "61s", "1w", "00:30"]) | st.integers(
    1, 9_999_999
).map(lambda n: f"{n}s")
SCRIPTS = st.lists(
    LINE | st.sampled_from(["", "  if true; then", "\ttab", "# note: x", "é ünï 😀"]), min_size=1, max_size=5
).map("\n".join)
SPEEDS = st.dictionaries(st.sampled_from(["h100", "a100-80gb", "b200"]), st.floats(1e-6, 1e6), min_size=1)
GPUS = st.sampled_from(
    [
        *(
            0,
            1,
            8,
            "2x8",
            "h200:8",
            "a100-80gb:8",
            "4xh200:8",
            "h200,h100:8",
            "a100-80gb,h100:8",
            "2..8xh200:8",
            "any-60gb:8",
        ),
        *("1/4", "0.5", "h100:0.25", "20GiB", "h100,a100-80gb:20GiB", "4x1/2", "1/3", "any-60gb:20GiB"),
        *("h100.1g.10gb", "4xh100.1g.10gb:2", "1g.10gb", "h100.1g.10gb,a100-80gb.1g.10gb"),
        *("h100:8|a100:16", "2xh100:8|4xa100:8", "h100:1/4|a100:1/2", "h100.1g.10gb|a100:1/2", "h100:0"),
    ]
)
DEPENDS = st.sampled_from(["17", "afterok:17:18_3", "afterany:9,singleton", "aftercorr:4", ["afternotok:1", "2"]])
# One strategy for each key of a job file: a key without one fails below.
VALUES = {
    "name": WORD | LINE,
    "run": SCRIPTS
    | st.tuples(LINE, TEXT, TEXT).map(list)
    | st.sampled_from(["python a.py --lr 1", "torchrun a.py", "mpirun ./a", "A=1 b", "cd x", "8"]),
    "gpus": GPUS,
    "nodes": st.sampled_from([1, 2, 4, "2..8"]),
    "gpus_per_node": st.sampled_from([0, 1, 4, 8]),
    "share": st.sampled_from(["mps", "mig", "time"]),
    "cpus": st.integers(0, 999),
    "memory": st.sampled_from(["64", "512M", "1.5", "0.3", "2T", "3K", "0.0013", "7.123456789T"]) | st.integers(0, 999),
    "resources": st.sampled_from(["scratch:100GiB,matlab:2", "nic=3", {"scratch": "1.3T", "x": None}]),
    "tasks_per_node": st.integers(1, 64),
    "workdir": st.just("here") | TEXT.map(lambda text: "/" + text),
    "env": st.dictionaries(
        st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), TEXT | SCRIPTS | st.integers() | st.none(), min_size=1
    ),
    "setup": SCRIPTS | TEXT,
    "project": WORD,
    "queue": WORD,
    "priority": st.integers(-100, 100),
    "time": TIMES,
    "idle": TIMES,
    "terminal": st.booleans(),
    "retry": st.integers(0, 100),
    "checkpoint": st.sampled_from(["/nfs/c", "c", "file:///x"]),
    "outputs": st.sampled_from(["s3://b/c", "gs://b", "az://b/c/d/"]),
    "warm": st.booleans(),
    "hold": st.booleans(),
    "allow_never": st.booleans(),
    "grace": TIMES,
    "collective_timeout": TIMES,
    "upload": st.just("ab" * 32),
    "secrets": st.sampled_from([["HF_TOKEN"], "HF_TOKEN,WANDB_API_KEY"]),
    "ports": st.sampled_from([[8888], {"jupyter": 8888, "board": "6006:keep-path"}, ["a=1", 2], "80,81"]),
    "notify": st.sampled_from(
        ["me@example.org", ["team-chat", "$CHAT_URL"], {"to": "a@b.example", "on": ["end", "failure"]}, {"to": ["x"]}]
    ),
    "on_end": LINE | st.sampled_from([{"run": "a\nb"}, {"run": "a", "time": "1h"}]),
    "labels": st.dictionaries(
        st.from_regex(r"[a-z0-9]([a-z./-]{0,4}[a-z0-9])?", fullmatch=True), LINE | st.just(""), min_size=1
    )
    | st.just({"on": "no"}),
    "depends_on": DEPENDS,
    "array": st.sampled_from(["0-99%8", "1,3,7-20:2", "5", "0-1%1", 7]),
    "begin": st.sampled_from(
        ["2h", "now", "2030-12-01T08:00+01:00", "2030-12-01T08:00:00.25Z", "1999-01-01T00:00Z", 1.9e9]
    ),
    "within": st.sampled_from(["rack", "node", "leaf"]),
    "prefer": st.sampled_from(["rack", "node"]),
    "slice": st.sampled_from([1, 2]),
    "slice_within": st.just("rack"),
    "preemptible": st.booleans(),
    "saves_on_stop": st.booleans(),
    "reservation": WORD,
    "plan": st.sampled_from(["auto", "tp=2,pp=2,fsdp=2", "dp=2", "fsdp=4,zero=2", "tp=2,zero=1"]),
    "requirements": st.sampled_from(["none", "a/requirements.txt"]),
    "data": st.sampled_from(
        [
            {"train": "s3://b/p", "mode": "stream"},
            {"a": "/nfs/x", "mode": "mount"},
            {"t": "hf://o/d"},
            {"mode": "stream"},
        ]
    ),
    "software": st.sampled_from(
        [
            {"conda": "env", "modules": ["cuda/12", "gcc"]},
            {"venv": "v"},
            {"uv": "a/uv.lock", "modules": ["gcc"]},
            {"modules": "a,b", "requirements": "r.txt"},
            {"requirements": "r.txt"},
        ]
    ),
    "image": st.sampled_from(["docker.io/a/b:3", "x.sif"]),
    "nodelist": st.sampled_from(["n[0-3]", "b,a", "gpu[001-003,007],x", "n2,n1"]),
    "exclude": st.sampled_from(["n[4-6]", "z"]),
    "slurm": st.sampled_from(
        [
            {"script": "a.sh", "args": '["--x\\n"]', "ntasks": "2"},
            {"components": json.dumps([{"gpus": 2, "cpus": "4", "slurm": {"ntasks": "1"}}, {"nodes": 2}])},
        ]
    ),
    "speeds": SPEEDS,
    "planned_speeds": SPEEDS,
    "type": st.sampled_from(["job", "service"]),
    "replicas": st.sampled_from(["2", "1..4"]),
    "port": st.sampled_from(["auto", 8000]),
    "ready": st.sampled_from(["tcp", "/health"]),
    "ready_within": TIMES,
    "sleep": st.just("/sleep?level=1"),
    "wake": st.just("/wake_up"),
    "scale": st.sampled_from(
        [{"queue": "2s"}, {"ttft": "500ms", "kv": "80%", "idle": "1h"}, {"in_flight": 16}, {"queue": "0.25s"}]
    ),
    "update": st.sampled_from(
        [
            "rolling",
            "blue-green",
            {"canary": "5%..50%"},
            {"canary": "0.1%", "step": "5m"},
            {"blue-green": "on", "step": "90s"},
        ]
    ),
    "prefill_for": st.sampled_from(["chat", {"service": "chat", "protocol": "sglang"}]),
}
RARE = frozenset(
    {"share", "within", "prefer", "slice", "slice_within", "plan", "image", "slurm", "depends_on", "nodes"}
)
OF_SERVICES = {"type": "service", "run": "vllm serve", "name": "web"}


# What a key needs beside it.
BESIDE = {
    **dict.fromkeys(("replicas", "port", "ready", "ready_within", "update", "prefill_for"), OF_SERVICES),
    "scale": {**OF_SERVICES, "replicas": "0..4"},
    "share": {"run": "a", "gpus": "1/4"},
    "sleep": {**OF_SERVICES, "gpus": 1, "wake": "/w"},
    "wake": {**OF_SERVICES, "gpus": 1, "sleep": "/s"},
    "type": {"run": "a", "name": "web"},
    "slice": {"run": "a", "nodes": 4, "slice_within": "rack"},
    "slice_within": {"run": "a", "nodes": 4, "slice": 2},
    "depends_on": {"run": "a", "array": "0-3"},
    "nodes": {"run": "a", "gpus_per_node": 8},
    "run": {"tasks_per_node": 1},
}


@st.composite
def mappings(draw):
    """Keys that a job may have: added one by one, those that contradict the others left out."""
    service = draw(st.booleans()) and draw(st.booleans())
    found = dict(OF_SERVICES) if service else {"run": draw(VALUES["run"])}
    if not service and not accepted(found):
        found["tasks_per_node"] = 1
    assume(accepted(found))
    if service:
        found |= {"sleep": "/sleep", "wake": "/wake", "gpus": 1} if draw(st.booleans()) else {}
    for key in draw(st.permutations(sorted(VALUES)))[: draw(st.integers(0, 12))]:
        if key not in found and (wider := found | {key: draw(VALUES[key])}) and accepted(wider):
            found = wider
    return found


def accepted(mapping):
    try:
        return spec_from_mapping(mapping, workdir="/w", now_s=NOW_S)
    except PhalanxError:
        return None


def again(keys):
    return spec_from_mapping(keys, workdir="/elsewhere", now_s=NOW_S)


def test_every_key_of_a_job_file_has_values_that_a_job_may_have():
    assert set(VALUES) == set(KEY_KINDS)


@pytest.mark.timeout(300)
@given(mappings())
@settings(max_examples=examples(500), deadline=None)
def test_the_keys_of_a_spec_give_the_spec_again(mapping):
    check(mapping)


@pytest.mark.parametrize("key", sorted(KEY_KINDS))
def test_each_key_comes_back(key):
    seen = []

    @given(VALUES[key])
    @settings(max_examples=size(4, 50), deadline=None)
    def each(value):
        mapping = {**BESIDE.get(key, {"run": "a"}), key: value}
        if accepted(mapping):
            seen.append(mapping)
            check(mapping)

    each()
    assert seen


def check(mapping):
    spec = accepted(mapping)
    if spec.begin_s is not None and spec.begin_s <= NOW_S:  # it has no effect any more
        spec = accepted({**mapping, "begin": None})
    keys = job_keys(spec, now_s=NOW_S)
    assert again(keys) == spec
    assert again(json.loads(json.dumps(keys))) == spec
    text = yaml_text(keys)
    assert again(parse_job_file(text, path="job.yaml").mapping) == spec, text
    assert job_keys(again(keys), now_s=NOW_S) == keys


@given(st.integers(1, 40_000_000_000).map(lambda thousandths: thousandths / 1000))
@settings(max_examples=examples(1000), deadline=None)
def test_a_duration_comes_back(seconds):
    assert parse_duration_s(exact_duration(seconds)) == seconds
