"""A mapping becomes a job, or a refusal that says which key and what to write instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job_file.keys import KEY_KINDS, InvalidKey
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.nearest_match import nearest_match
from phalanx.core.work.spec import LaunchMode


def spec(**keys):
    return spec_from_mapping({"run": "python train.py", **keys}, workdir="/home/ada/project")


def refused(**keys):
    with pytest.raises(PhalanxError) as caught:
        spec(**keys)
    return caught.value


def test_a_command_alone_is_a_job_on_one_cpu_node():
    job = spec()
    assert job.role.argv == ("python", "train.py")
    assert job.role.gpus == GpuRequest(total=0)
    assert (job.name, job.workdir, job.time_limit_s) == ("train.py", "/home/ada/project", None)


def test_every_key_is_read():
    job = spec(
        name="gpt",
        gpus="4xh200:8",
        cpus=16,
        memory="64",
        workdir="/data",
        env={"A": "1.10", "B": None},
        setup="pip install x",
        project="ml",
        queue="fast",
        priority=-3,
        time="2:00:00",
        retry=2,
        checkpoint="/ckpt",
        warm=True,
        hold=True,
        grace="1m",
        collective_timeout="20m",
        tasks_per_node=2,
        labels={"team": "vision"},
        upload="a" * 64,
    )
    assert job.role.gpus == GpuRequest(total=32, nodes=4, per_node=8, model="h200")
    assert (job.role.cpus, job.role.memory_bytes, job.role.launch) == (16, 64 << 30, LaunchMode.FIXED)
    assert job.env == (("A", "1.10"), ("B", ""))
    assert (job.time_limit_s, job.grace_s, job.collective_timeout_s) == (7200.0, 60.0, 1200.0)
    assert (job.warm, job.hold, job.retry, job.priority) == (True, True, 2, -3)
    assert (job.project, job.queue, job.checkpoint, job.setup) == ("ml", "fast", "/ckpt", "pip install x")


def test_null_counts_as_not_given():
    assert spec(gpus=None, time=None, env=None) == spec()


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("gpuz", "gpus"),
        ("GPUS", "gpus"),
        ("gpus-per-node", "gpus_per_node"),
        ("timeout", "time"),
        ("command", "run"),
        ("mem", "memory"),
        ("partition", "queue"),
        ("enviroment", "env"),
        ("retyr", "retry"),
        ("work_dir", "workdir"),
    ],
)
def test_unknown_key_names_the_nearest(key, near):
    if key == "enviroment":  # too far from "env" for a slip, and not a word used elsewhere
        assert "known keys" in refused(**{key: 1}).hint
        return
    assert refused(**{key: 1}).hint == f"did you mean {near!r}?"


@pytest.mark.parametrize(
    "image", ["docker.io/library/python:3.11", "ghcr.io/a/b@sha256:" + "0" * 64, "train.sif", "oras://a/b"]
)
def test_image_is_taken_as_written(image):
    assert spec(image=image).image == image


@pytest.mark.parametrize("image", ["two words", "--privileged", "a;b", "x" * 600])
def test_what_names_no_image_is_refused(image):
    assert "is not an image name" in refused(image=image).message


def test_packages_and_an_image_at_once_are_refused_and_none_is_not():
    assert "requirements cannot be combined" in refused(image="a", requirements="requirements.txt").message
    assert spec(image="a", requirements="none").image == "a"


@pytest.mark.parametrize("time", [90, "90", 1.5])
def test_bare_number_is_no_time(time):
    error = refused(time=time)
    assert "has no unit" in error.message
    assert f"{time}m for minutes" in error.hint


@pytest.mark.parametrize(
    "keys",
    [
        {"gpus": "2x8", "nodes": 3},
        {"gpus": 7, "nodes": 2},
        {"gpus": 16, "nodes": 2, "gpus_per_node": 4},
        {"gpus": "0x8"},
        {"gpus": "eight"},
        {"nodes": 0},
        {"nodes": "two"},
        {"cpus": -1},
        {"memory": "lots"},
        {"retry": 1000},
        {"priority": 1e9},
        {"warm": "maybe"},
        {"env": {"1A": "x"}},
        {"env": {"RANK": "0"}},
        {"env": {"PHALANX_JOB_ID": "1"}},
        {"env": {"A": "x\0"}},
        {"name": "x" * 200},
        {"name": "a\nb"},
        {"time": "0s"},
        {"idle": "0"},
        {"terminal": True, "array": "0-3"},
        {"terminal": True, "image": "python:3.11"},
        {"idle": "1h", "type": "service"},
        {"time": "9000d"},
        {"checkpoint": "ftp://bucket"},
        {"upload": "zz"},
        {"labels": {"a b": "c"}},
        {"tasks_per_node": 0},
        {"run": ""},
        {"run": []},
        {"run": 7.5e300 * 1e300},
        {"run": ["a", ["b"]]},
        {"run": "x" * 200_000},
        {"env": {f"A{i}": "x" * 100_000 for i in range(12)}},
        {"env": "A"},
        {"gpus": True},
    ],
)
def test_refusals_are_one_of_ours(keys):
    if keys.get("run") == float("inf"):
        assert spec(**keys).role.argv == ("inf",)  # a number is text, however odd
        return
    refused(**keys)


def test_contradictions_are_usage_and_unreadable_values_are_a_bad_file():
    assert type(refused(gpus="2x8", nodes=3)) is BadRequest
    assert refused(gpus="2x8", nodes=3).exit_code == 64
    assert isinstance(refused(gpus="x"), InvalidKey)
    assert refused(gpus="x").exit_code == 78


def test_a_plain_line_is_split_and_anything_shellish_is_left_to_bash():
    assert spec(run="torchrun --nproc-per-node 8 train.py").role.argv[0] == "torchrun"
    for shellish in (
        "cd src && python x.py",
        "python x.py > log",
        "A=1 python x.py",
        "source env.sh",
        'python -c "print(1)"',
        "ls *.py",
    ):
        assert spec(run=shellish).role.script == shellish
    assert spec(run="cd src && python x.py").name == "x.py"


def test_several_lines_must_state_tasks_per_node():
    lines = "pip list\npython train.py\n"
    assert "tasks_per_node" in refused(run=lines).hint
    assert spec(run=lines, tasks_per_node=1).role.script == lines
    assert spec(run="# why\npython train.py \\\n  --lr 1\n").role.launch is LaunchMode.PER_DEVICE


def test_workdir_is_meant_from_where_the_mapping_was_written():
    assert spec(workdir="sub/dir").workdir == "/home/ada/project/sub/dir"
    with pytest.raises(InvalidKey):
        spec_from_mapping({"run": "true", "workdir": "x"}, workdir="relative")


def test_environment_may_be_a_list_of_pairs():
    assert spec(env=["A=1=2", "B="]).env == (("A", "1=2"), ("B", ""))
    assert "'='" in refused(env=["A"]).message


def test_nearest_bears_slips_swaps_and_prefixes():
    verbs = ["run", "submit", "cancel", "logs", "release", "requeue"]
    assert nearest_match("sumbit", verbs) == "submit"
    assert nearest_match("can", verbs) == "cancel"
    assert nearest_match("lgos", verbs) == "logs"
    assert nearest_match("frobnicate", verbs) is None
    assert nearest_match("", verbs) is None
    assert nearest_match("x" * 10_000, verbs) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*KEY_KINDS, "image", "nonsense"]), JSON, max_size=6))
def test_any_json_is_a_job_or_a_refusal(mapping):
    try:
        job = spec_from_mapping(mapping, workdir="/w")
    except PhalanxError as error:
        refusal = error.message
    else:
        refusal = "none"
        assert job.role.argv or job.role.script
        assert job.workdir.startswith("/")
    assert refusal
