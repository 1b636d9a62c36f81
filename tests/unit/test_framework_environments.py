"""What JAX, TensorFlow and torchrun find in a rank's environment, read as each of them reads it; and programs that would be separate MPI worlds."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from phalanx.core.state.commands import StartTasks
from phalanx.core.work.spec import LaunchMode
from phalanx.node.logic.script_check import line_of_mpi4py
from phalanx.node.logic.script_imports import imports_package, module_file
from phalanx.node.logic.separate_worlds import mpi_library, shell_world
from phalanx.node.logic.variables.environment import MemberFolders, NodeContext, rank_environment
from tests.unit.test_environment import job

FOLDERS = MemberFolders(hostfile="/s/hostfile", page="/s/page", reports="/s/reports")


def env_of(order, rank, *, jax=False, ipv6=True, base=None):
    start = StartTasks(
        node_id=order.node_id,
        job_id=order.job_id,
        epoch=order.epoch,
        generation=order.generation,
        port=29500,
        resume=None,
    )
    grant = next(one for one in order.allocation.grants if one.first_rank <= rank < one.first_rank + one.tasks)
    node = NodeContext(base=base or {}, devices=("a", "b"), virtual=False, folders=FOLDERS, jax=jax, ipv6=ipv6)
    return rank_environment(order, start, grant, rank - grant.first_rank, node)[0]


# ------------------------------------------------------------------------------------------------------------------ JAX


def jax_initialize(env):
    """Rank, size, coordinator, its bind address and local devices, as `jax.distributed.initialize()` of JAX 0.10.2 finds them."""
    address = env.get("JAX_COORDINATOR_ADDRESS")
    devices = [int(one) for one in env["JAX_LOCAL_DEVICE_IDS"].split(",")] if env.get("JAX_LOCAL_DEVICE_IDS") else None
    if "OMPI_MCA_orte_hnp_uri" not in env:
        return None
    if address is None:
        number = int(env["OMPI_MCA_orte_hnp_uri"].split(".", maxsplit=1)[0]) // 2**12
        found: Any = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", env["OMPI_MCA_orte_hnp_uri"])
        address = f"{next(one for one in found.groups() if one)}:{number % 2**12 + 65535 - 2**12 + 1}"
    if devices is None:
        devices = [int(env["OMPI_COMM_WORLD_LOCAL_RANK"])]
    bind = env.get("JAX_COORDINATOR_BIND_ADDRESS", "[::]:" + address.rsplit(":", 1)[1])
    return int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"]), address, bind, devices


def test_jax_without_arguments_finds_rank_size_address_and_its_device():
    found = [jax_initialize(env_of(job(), rank, jax=True)) for rank in range(4)]
    assert [one[0] for one in found] == [0, 1, 2, 3]
    assert {one[1:4] for one in found} == {(4, "10.0.0.1:29499", "[::]:29499")}
    assert [one[4] for one in found] == [[0], [1], [0], [1]]


def test_one_jax_process_on_a_node_has_all_devices_of_the_job_there():
    assert jax_initialize(env_of(job(tasks=1), 1, jax=True))[4] == [0, 1]
    assert jax_initialize(env_of(job(per_node=4, tasks=2), 3, jax=True))[4] == [2, 3]
    assert jax_initialize(env_of(job(per_node=0, tasks=2), 3, jax=True))[4] == [1], "without devices, as on CPUs"


def test_jaxs_port_is_not_torchs():
    env = env_of(job(), 0, jax=True)
    assert env["JAX_COORDINATOR_ADDRESS"].rsplit(":", 1)[1] != env["MASTER_PORT"]


def test_without_ipv6_the_coordinator_binds_all_ipv4_addresses():
    assert jax_initialize(env_of(job(), 0, jax=True, ipv6=False))[3] == "0.0.0.0:29499"


def test_an_ipv6_address_is_in_brackets():
    two = ("fd00::1", "fd00::2")
    env = env_of(job(addresses=two), 1, jax=True)
    assert jax_initialize(env)[2] == "[fd00::1]:29499"
    torchrun = env_of(job(addresses=two, launch=LaunchMode.PER_NODE, tasks=1), 0)
    assert torchrun["PET_RDZV_ENDPOINT"] == "[fd00::1]:29500"
    assert json.loads(env["TF_CONFIG"])["cluster"]["worker"][0] == "[fd00::1]:29501"


def test_open_mpis_variables_are_set_for_jax_and_for_nothing_else():
    for order in (job(), job(launch=LaunchMode.PER_NODE, tasks=1)):
        assert not [name for name in env_of(order, 0) if name.startswith("OMPI_")]
    under_mpirun = env_of(job(launch=LaunchMode.ONCE, tasks=1), 0, jax=True)
    assert "OMPI_COMM_WORLD_RANK" not in under_mpirun, "mpirun sets its own"


@pytest.mark.parametrize(
    ("files", "uses"),
    [
        ({"t.py": "import jax"}, True),
        ({"t.py": "from jax.experimental import multihost_utils"}, True),
        ({"t.py": "def f():\n  import jax.numpy as jnp"}, True),
        ({"t.py": "import model", "model.py": "import jax"}, True),
        ({"t.py": "from lib import model", "lib/__init__.py": "", "lib/model.py": "import jax"}, True),
        ({"t.py": "import model", "model.py": "import t"}, False),
        ({"t.py": "import torch  # not jax"}, False),
        ({"t.py": "import jaxtyping"}, False),
        ({"t.py": "import jax("}, False),
        ({}, False),
    ],
)
def test_jax_is_found_in_the_script_and_in_the_modules_beside_it(files, uses):
    texts = {f"/w/{name}": text.encode() for name, text in files.items()}
    assert imports_package("jax", "/w/t.py", texts.get) is uses


def test_a_module_of_the_working_directory_is_a_script_too():
    assert module_file(["python", "-u", "-m", "train.main", "--x"]) == "train/main.py"
    assert module_file(["python", "train.py", "-m", "x"]) is None
    assert module_file(["python", "-m"]) is None


# ----------------------------------------------------------------------------------------------------------- TensorFlow


def tf_resolver(env):
    """Cluster, type and index, as TFConfigClusterResolver reads them."""
    config = json.loads(env["TF_CONFIG"])
    return config["cluster"], config["task"]["type"], config["task"]["index"]


def test_tensorflow_finds_a_worker_for_each_task():
    cluster, kind, index = tf_resolver(env_of(job(), 3))
    assert (kind, index) == ("worker", 3)
    assert cluster == {"worker": ["10.0.0.1:29501", "10.0.0.1:29502", "10.0.0.2:29503", "10.0.0.2:29504"]}


def test_tensorflow_finds_a_chief_and_an_evaluator_on_request():
    order = job(env=[("TF_ROLES", "chief, evaluator")])
    places = [tf_resolver(env_of(order, rank))[1:] for rank in range(4)]
    assert places == [("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)]
    cluster = tf_resolver(env_of(order, 3))[0]
    assert cluster == {"chief": ["10.0.0.1:29501"], "worker": ["10.0.0.1:29502", "10.0.0.2:29503"]}
    alone = job(nodes=1, per_node=1, env=[("TF_ROLES", "chief,evaluator")])
    assert tf_resolver(env_of(alone, 0))[1] == "chief", "one task trains rather than evaluates"


# ------------------------------------------------------------------------------------------------------- separate worlds


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import os\nfrom mpi4py import MPI\n", 2),
        ("import mpi4py.MPI\n", 1),
        ("try:\n  from mpi4py import MPI\nexcept ImportError:\n  MPI = None\n", None),
        ("def f():\n  from mpi4py import MPI\n", None),
        ("import mpi4py(", None),
    ],
)
def test_a_script_that_needs_mpi_imports_it_unconditionally(text, line):
    assert line_of_mpi4py(text.encode()) == line


@pytest.mark.parametrize(
    ("text", "launcher"),
    [
        ("#!/bin/bash\nmodule load mpi\nmpirun ./solver\n", "mpirun"),
        ("# mpirun ./solver\npython train.py\n", None),
        ("torchrun train.py\n", None),
        ("", None),
    ],
)
def test_a_shell_script_that_calls_mpirun_is_found(text, launcher):
    assert shell_world(text) == launcher


def test_a_program_linked_with_mpi_is_found_by_its_dynamic_section(tmp_path):
    assert mpi_library(reads(elf("libc.so.6", "libmpi.so.40"))) == "libmpi.so.40"
    assert mpi_library(reads(elf("libc.so.6", "libmpich.so.12"))) == "libmpich.so.12"
    assert mpi_library(reads(elf("libc.so.6", "libmpicalc.so"))) is None
    assert mpi_library(reads(elf("libmpi.so.40")[:150])) is None
    cut = [mpi_library(reads(elf("libmpi.so.40")[:length])) for length in range(400)]
    assert all(found is None or found.startswith("libmpi.so") for found in cut), "cut anywhere, even in the name"
    assert mpi_library(reads(b"#!/bin/sh\n")) is None
    assert mpi_library(reads(b"")) is None


def reads(data):
    """As os.pread reads a file: nothing beyond its end."""
    return lambda at, length: data[at : at + length]


def elf(*libraries):
    """A file of 64 bits with one segment that is loaded at 0x1000, and a dynamic section that needs these libraries."""
    import struct

    names, offsets = b"\0", []
    for library in libraries:
        offsets.append(len(names))
        names += library.encode() + b"\0"
    entries = [(1, offset) for offset in offsets] + [(5, 0x1000 + 64 + 112 + 16 * (len(libraries) + 2)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    at = 64 + 2 * 56
    size = at + len(dynamic) + len(names)
    header = b"\x7fELF\x02\x01" + bytes(26) + struct.pack("<QQIHHH", 64, 0, 0, 64, 56, 2) + bytes(6)
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x1000, 0, size, size, 0) + struct.pack(
        "<IIQQQQQQ", 2, 6, at, 0x1000 + at, 0, len(dynamic), len(dynamic), 0
    )
    return header + segments + dynamic + names


def test_a_job_may_not_see_another_clusters_place():
    base = {"OMPI_COMM_WORLD_RANK": "7", "JAX_COORDINATOR_ADDRESS": "x:1", "TF_CONFIG": "{}"}
    env = env_of(replace(job(), restarts=0), 0, base=base)
    assert "OMPI_COMM_WORLD_RANK" not in env
    assert env["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:29499"
