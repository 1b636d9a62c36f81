"""What podman and apptainer are told, word for word: golden files in tests/golden/images. `PHALANX_GOLDEN=write` writes them anew."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.spec import JobSpec, Role
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic import images
from phalanx.node.logic.events import MemberKey
from phalanx.node.logic.images import ContainerSettings, InstalledRuntime, RuntimeKind
from phalanx.node.member.container_runtime import ContainerRuntime
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.scratch import scratch_of
from phalanx.node.prepare.container_images import find_runtime, prepare_container
from phalanx.node.processes.attempt_processes import TaskSpec
from phalanx.node.processes.containment import AttemptKey

GOLDEN = Path(__file__).parents[1] / "golden" / "images"
PODMAN = InstalledRuntime(kind=RuntimeKind.PODMAN, path="/usr/bin/podman", init="/usr/bin/catatonit")
APPTAINER = InstalledRuntime(kind=RuntimeKind.APPTAINER, path="/usr/bin/apptainer")
SINGULARITY = InstalledRuntime(kind=RuntimeKind.SINGULARITY, path="/usr/bin/singularity")
OURS = ContainerSettings(
    image="nvcr.io/nvidia/pytorch:26.10-py3",
    name="phalanx-7.1.0.gpu1-ab12",
    owner="boot/4026531836/99/1234",
    workdir="/home/ada/gpt",
    uid=1000,
    gid=1000,
    mounts=("/home/ada/gpt", "/state/attempts/7.1"),
    folder="/state/attempts/7.1",
    gpus=("GPU-1", "GPU-2"),
    devices=("/dev/infiniband",),
    nofile=(1024, 524288),
    processes=(32768, 32768),
)
ROOTS = replace(OURS, uid=0, gid=0, gpus=(), devices=(), mounts=())
VARIABLES = {"RANK": "0", "PHALANX_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": "/opt/bin:/bin", "TOKEN": "s3cret"}


def file_of(variables):
    path, content = images.variables_file(PODMAN, OURS, "rank-0", variables) or ("", b"")
    return path, content.decode()


DRAWN = {
    "podman-rank": lambda: images.run_command(PODMAN, OURS, "rank-0", ("python", "train.py"), VARIABLES),
    "podman-as-root-without-init": lambda: images.run_command(
        replace(PODMAN, init=""), ROOTS, "setup", "make && true", {}
    ),
    "podman-exec-on-a-terminal": lambda: images.exec_command(PODMAN, OURS, "rank-0", ["bash"], terminal=True),
    "podman-file-of-variables": lambda: file_of(VARIABLES),
    "podman-around": lambda: images.runtime_environment(PODMAN, {"PATH": "/usr/bin", "HOME": "/root"}, VARIABLES),
    "apptainer-rank": lambda: images.run_command(
        APPTAINER, replace(OURS, image="/c/x.sif"), "rank-0", ("python", "train.py"), VARIABLES
    ),
    "apptainer-around": lambda: images.runtime_environment(APPTAINER, {"PATH": "/usr/bin"}, VARIABLES),
    "singularity-around": lambda: images.runtime_environment(SINGULARITY, {"PATH": "/usr/bin"}, VARIABLES),
    "podman-pull": lambda: images.resolve_image(PODMAN, "docker.io/a/b@sha256:00", workdir="/w", cache="/c"),
    "apptainer-pull": lambda: images.resolve_image(APPTAINER, "ghcr.io/a/b:1", workdir="/w", cache="/c"),
    "apptainer-file": lambda: images.resolve_image(APPTAINER, "train.sif", workdir="/w", cache="/c"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_it_is_as_drawn(name):
    text = json.dumps(DRAWN[name](), indent=1) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("PHALANX_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


SECRET = "0123456789abcdef" * 2
NAMES = [
    "TOKEN",
    "REGISTRY_PASSWORD",
    "STORAGE_KEY",
    "STORAGE_ACCOUNT_KEY",
    "CONTAINER_TOKEN",
    "CONTAINERS_SECRET",
    "DBUS_KEY",
    "PODMAN_PASSWORD",
    "NOTIFY_TOKEN",
    "XDG_SECRET",
    "APPTAINER_DOCKER_PASSWORD",
    "TMP",
    "LD_X",
    "LD_LIBRARY_PATH",
    "MALLOC_X",
    *sorted(images._READ_BY_RUNTIME),
]


@pytest.mark.parametrize("name", NAMES)
def test_no_value_is_among_the_words(name):
    for runtime in (PODMAN, APPTAINER, SINGULARITY):
        words = images.run_command(runtime, OURS, "rank-0", ("a",), {name: SECRET, "RANK": "0"})
        assert SECRET not in " ".join(words)
        around = images.runtime_environment(runtime, {}, {name: SECRET})
        file = images.variables_file(runtime, OURS, "rank-0", {name: SECRET})
        by_file = file is not None and f"{name}={SECRET}\n".encode() == file[1]
        assert (SECRET in around.values()) is not by_file  # it goes inside, by one way


@pytest.mark.parametrize("name", ["PATH", "HOME", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR", "CONTAINERS_STORAGE_CONF"])
def test_what_would_change_the_runtime_reaches_the_command_alone(name):
    assert images.runtime_environment(PODMAN, {name: "the node's"}, {name: "the job's"})[name] == "the node's"
    assert file_of({name: "the job's"}) == ("/state/attempts/7.1/rank-0.env", f"{name}=the job's\n")
    words = images.run_command(PODMAN, OURS, "rank-0", ("a",), {name: "the job's"})
    assert "--env-file=/state/attempts/7.1/rank-0.env" in words
    assert f"--env={name}" not in words


@pytest.mark.parametrize("name", ["REGISTRY_KEY", "STORAGE_SERVICE_ACCOUNT", "CONTAINER_PEM", "TMP"])
def test_variable_that_no_runtime_reads_keeps_its_lines(name):
    assert images.runtime_environment(PODMAN, {}, {name: "a\nb"}) == {name: "a\nb"}
    assert images.variables_file(PODMAN, OURS, "rank-0", {name: "a\nb"}) is None


@pytest.mark.parametrize("value", [f"{SECRET}\nb", f"{SECRET}\r", SECRET * 2000])
def test_value_that_no_file_of_variables_takes_is_refused_in_one_line_without_it(value):
    with pytest.raises(ValueError, match="env: REGISTRY_AUTH_FILE must be one line") as caught:
        images.variables_file(PODMAN, OURS, "rank-0", {"REGISTRY_AUTH_FILE": value})
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def inside(folder):
    return ContainerRuntime(runtime=PODMAN, container=replace(OURS, folder=str(folder)), base={"PATH": "/usr/bin"})


def task(**variables):
    return TaskSpec(task_id="rank-0", command=("a",), cwd="/w", env=variables)


KEY = AttemptKey(job_id="7", epoch=1, generation=0, node_key="n0")


def test_file_of_variables_is_new_and_its_owners_alone(tmp_path):
    there = tmp_path / "rank-0.env"
    (tmp_path / "elsewhere").write_text("kept")
    there.symlink_to(tmp_path / "elsewhere")  # what an earlier generation may have left there
    found = inside(tmp_path).wrap_task(KEY, task(PATH="/opt/bin", TOKEN=SECRET))
    assert f"--env-file={there}" in found.command
    assert found.env["PATH"] == "/usr/bin"
    assert there.read_text() == "PATH=/opt/bin\n"
    assert there.lstat().st_mode & 0o7777 == 0o600
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_job_whose_variable_cannot_go_inside_is_refused(tmp_path):
    with pytest.raises(PreparationFailed, match="env: PATH must be one line") as caught:
        inside(tmp_path).wrap_task(KEY, task(PATH="/a\n/b"))
    assert caught.value.charge
    assert list(tmp_path.iterdir()) == []


def test_folder_in_another_is_mounted_with_it_and_the_root_never():
    assert images.mount_folders(["/w/out", "/w", "/", "/work", "", "s3://b"]) == ("/w", "/work")


@pytest.mark.parametrize("path", ["/a,b", "/a:b", '/a"b'])
def test_path_that_a_runtime_would_take_apart_is_refused(path):
    with pytest.raises(ValueError, match="/a"):
        images.mount_folders([path])


@pytest.mark.parametrize(
    ("code", "signal", "ended"),
    [
        (0, None, (0, None)),
        (7, None, (7, None)),
        (139, None, (None, 11)),
        (255, None, (255, None)),
        (None, 9, (None, 9)),
    ],
)
def test_runtime_speaks_of_signals_as_a_shell_does(code, signal, ended):
    assert images.command_exit(code, signal) == ended


def program(folder, name):
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def found(folder, image):
    runtime = find_runtime(str(folder), image)
    return None if runtime is None else runtime.kind


def test_podman_goes_first_and_leaves_files_to_apptainer(tmp_path):
    assert found(tmp_path, "a") is None
    program(tmp_path, "singularity")
    assert found(tmp_path, "a") is RuntimeKind.SINGULARITY
    program(tmp_path, "podman")
    assert found(tmp_path, "a") is RuntimeKind.PODMAN
    assert found(tmp_path, "a.sif") is RuntimeKind.SINGULARITY


def test_node_without_a_runtime_refuses_in_one_line(tmp_path):
    grant = NodeGrant(node_id=NodeId("n0"), node_rank=0, devices=(), first_rank=0, tasks=1, cpus=1, memory_bytes=0)
    order = PrepareTasks(
        node_id=NodeId("n0"),
        job_id=JobId("1"),
        epoch=Epoch(1),
        generation=Generation(0),
        spec=JobSpec(name="j", role=Role(argv=("true",)), workdir="/", image="a/b:1"),
        allocation=Allocation(grants=(grant,)),
        addresses=("127.0.0.1",),
        output_dir="",
        checkpoint_dir="",
        candidates=(),
        restarts=0,
        deadline_s=None,
        mtbf_s=1.0,
    )
    present = MemberRuntime(
        key=MemberKey(JobId("1"), Epoch(1), Generation(0)),
        prepare=order,
        grant=grant,
        scratch=scratch_of(str(tmp_path), JobId("1"), Epoch(1)),
        workdir="/",
    )
    with pytest.raises(PreparationFailed, match="neither podman nor apptainer is installed on this node") as caught:
        prepare_container(present, cache=str(tmp_path), base={"PATH": str(tmp_path)}, open_output=lambda: -1, gpus=())
    assert caught.value.charge
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "everywhere"),
    [
        ("Error: reading manifest 99: manifest unknown", True),
        ('short-name "a/b" did not resolve to an alias', True),
        ("requested access to the resource is denied", True),
        ("dial tcp 10.0.0.1:443: connect: connection refused", False),
        ("write /var/tmp/x: no space left on device", False),
    ],
)
def test_pull_that_fails_everywhere_is_told_from_one_that_fails_here(said, everywhere):
    assert images.is_missing_image(said) is everywhere
