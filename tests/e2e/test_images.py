"""Jobs in images by a real podman, with a storage of its own: one busybox and this machine's Python, mounted."""

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.cluster import free_port
from phalanx.engines.local import records
from tests import canaries
from tests.e2e.test_mpi import PROGRAM

PODMAN, BUSYBOX = shutil.which("podman"), shutil.which("busybox")
pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.prove,
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 or not PODMAN or not BUSYBOX, reason="needs root, podman and busybox-static: make image-tools"
    ),
]

PATIENCE_S = 120.0  # a hang guard
IMAGE = "localhost/px-tests:1"
APPLETS = ["sh", "cat", "env", "sleep", "id", "echo", "touch", "kill", "ps", "readlink", "grep", "test", "true"]
# crun wants all of cgroups in version 2 or all in version 1; a host with both is given the first here, as distributions have it today.
WORLD = """
if mountpoint -q /sys/fs/cgroup/unified; then umount -l /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; fi
exec sleep infinity
"""
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{0}/graph"\nrunroot = "{0}/run"\n'
REGISTRIES = '[[registry]]\nlocation = "127.0.0.1:{0}"\ninsecure = true\n'


class World:
    """A mount namespace with a head in it, and podman's storage beside it."""

    def __init__(self, folder):
        self.folder, self.work, self.home = folder, folder / "work", folder / "home"
        self.work.mkdir()
        (folder / "storage.conf").write_text(STORAGE.format(folder))
        self.registry = free_port()
        (folder / "registries.conf").write_text(REGISTRIES.format(self.registry))
        kept = canaries.environment()
        self.env = {
            **kept,
            "PHALANX_HOME": str(self.home),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
            "ONLY_ON_THE_NODE": "1",
        }
        self.keeper = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c", WORLD])
        until(
            lambda: os.readlink(f"/proc/{self.keeper.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"), "the namespace"
        )
        until(lambda: self.call("stat", "-fc", "%T", "/sys/fs/cgroup").stdout == "cgroup2fs\n", "cgroups of version 2")

    def call(self, *words, code=0, **more):
        done = subprocess.run(
            [
                "nsenter",
                "--mount",
                "--target",
                str(self.keeper.pid),
                "sh",
                "-c",
                'cd "$0" && exec "$@"',
                str(self.work),
                *words,
            ],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            **more,
        )
        assert code is None or done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done

    def __call__(self, *words, code=0, **more):
        return self.call(sys.executable, "-m", "phalanx.app.cli", *words, code=code, **more)

    def podman(self, *words):
        assert PODMAN is not None
        return self.call(PODMAN, *words).stdout

    def json(self, *words):
        return json.loads(self(*words, "--json").stdout)

    def last(self):
        return self.json("ps", "-a")[-1]["id"]

    def left(self):
        """Containers, their processes and their mounts."""
        containers = self.podman("ps", "--all", "--format", "{{.Names}}").split()
        mounts = [
            line
            for line in self.call("cat", "/proc/mounts").stdout.splitlines()
            if str(self.folder) in line and "/merged" in line
        ]
        conmons = self.call("pgrep", "-f", f"conmon.*{self.folder}", code=None).stdout.split()
        return [*containers, *mounts, *conmons]

    def build(self):
        """An image from a folder: no registry, no download."""
        root = self.folder / "root"
        (root / "bin").mkdir(parents=True)
        (root / "tmp").mkdir()
        shutil.copy(str(BUSYBOX), root / "bin" / "busybox")
        for name in APPLETS:
            os.symlink("busybox", root / "bin" / name)
        (root / "made-by").write_text("the image\n")
        subprocess.run(["tar", "-C", str(root), "-cf", str(self.folder / "root.tar"), "."], check=True)
        self.podman(
            "import",
            "--change",
            'ENTRYPOINT ["/bin/false"]',
            "--change",
            "USER 65534",
            str(self.folder / "root.tar"),
            IMAGE,
        )

    def close(self):
        self("down", "--cancel-jobs", code=None)
        self.call(PODMAN, "system", "reset", "--force", code=None)
        self.keeper.kill()
        self.keeper.wait()


def until(condition, what):
    limit = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < limit, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("images"))
    try:
        world.build()
        world("up", "--virtual", "1x4", "--port", str(free_port()))
        yield world
    finally:
        world.close()


@pytest.fixture(params=["with", "without"])
def init(world, request):
    """With and without a small first process for containers on the node."""
    found = shutil.which("catatonit")
    if request.param == "with" and not found:
        pytest.skip("needs catatonit: make image-tools")
    if request.param == "without" and found:
        world.call("mount", "--bind", "/dev/null", found)
    yield
    if request.param == "without" and found:
        world.call("umount", found)


def running(world, *words):
    """A job that said `ready` inside its image."""
    job = world("submit", "--quiet", "--image", IMAGE, *words).stdout.strip()
    until(lambda: "ready" in world("logs", job).stdout, f"job {job} runs")
    return job


def test_command_finds_the_image_around_it_and_the_jobs_folders_under_their_paths(world):
    (world.work / "beside.txt").write_text("from the working directory")
    script = 'cat /made-by beside.txt; echo; id -u; echo "$RANK of $WORLD_SIZE $A$ONLY_ON_THE_NODE $MANY"; echo kept >"$PHALANX_OUTPUT_DIR/out-$RANK"'
    done = world("run", "--image", IMAGE, "--gpus", "2", "-e", "A=a b", "-e", "MANY=x\ny", "--", "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            *(
                f"[rank {rank}] {line}"
                for rank in range(2)
                for line in ("the image", "from the working directory", "0")
            ),
            "[rank 0] 0 of 2 a b x",
            "[rank 0] y",
            "[rank 1] 1 of 2 a b x",
            "[rank 1] y",
        ]
    )
    world("get", world.last(), "outputs")
    assert sorted(os.listdir(world.work / "outputs")) == ["out-0", "out-1"]
    assert world.left() == []


def test_copy_of_the_working_directory_is_what_the_command_finds(world):
    (world.work / "travels.txt").write_text("sent along")
    (world.work / "requirements.txt").write_text("px-nowhere==7\n")
    done = world(
        "run", "--copy", "--image", IMAGE, "--", "sh", "-c", 'cat travels.txt; test "$PWD" != "$0"', str(world.work)
    )
    assert done.stdout == "sent along"
    assert "installed" not in done.stderr  # packages are the image's to bring
    (world.work / "requirements.txt").unlink()


def test_shell_text_and_setup_run_inside_though_the_image_has_no_bash(world):
    (world.work / "job.yaml").write_text(
        f"run: |\n  echo first; cat done\n  cat /made-by\ntasks_per_node: 1\nsetup: cat /made-by > done\nimage: {IMAGE}\n"
    )
    assert world("run", "job.yaml").stdout == "first\nthe image\nthe image\n"


@pytest.mark.parametrize(
    ("command", "code"), [("exit 7", 7), ("kill -SEGV $$; sleep 5", 139), ("no-such-program", 127)]
)
def test_exit_codes_are_those_of_the_command(world, command, code):
    world("run", "--image", IMAGE, "--", "sh", "-c", command, code=code)
    assert world.left() == []


@pytest.mark.usefixtures("init")
def test_cancel_asks_the_command_to_end_once_and_leaves_nothing(world):
    (world.work / "asked").unlink(missing_ok=True)
    ends = 'trap "echo asked >>asked; exit 0" TERM; echo ready; while true; do sleep 0.1; done'
    job = running(world, "--grace", "60s", "--", "sh", "-c", ends)
    world("cancel", job)
    until(lambda: world.json("show", job)["job"]["state"] == "cancelled", "it is cancelled")
    assert (world.work / "asked").read_text() == "asked\n"
    until(lambda: world.left() == [], "nothing is left")


@pytest.mark.usefixtures("init")
def test_command_that_handles_no_signal_ends_without_waiting_for_the_grace(world):
    job = running(world, "--grace", "30m", "--", "sh", "-c", "echo ready; exec sleep 3000")
    world("cancel", job)
    until(lambda: world.json("show", job)["job"]["state"] == "cancelled", "it is cancelled")
    until(lambda: world.left() == [], "nothing is left")


def test_command_that_will_not_end_is_killed_with_its_container(world):
    job = running(world, "--grace", "1s", "--", "sh", "-c", 'trap "" TERM; echo ready; while true; do sleep 1; done')
    world("cancel", job)
    until(lambda: world.json("show", job)["job"]["state"] == "cancelled", "it is cancelled")
    until(lambda: world.left() == [], "nothing is left")


def test_secret_is_in_the_container_and_in_no_command_line_and_nothing_keeps_it(world):
    value = f"px{os.urandom(16).hex()}"
    world("secrets", "set", "HF_TOKEN", input=f"{value}\n")
    script = 'echo "it has ${#HF_TOKEN} characters: $HF_TOKEN"; echo ready; sleep 600'
    job = running(world, "--secret", "HF_TOKEN", "--", "sh", "-c", script)
    assert f"it has {len(value)} characters: ***" in world("logs", job).stdout
    assert _processes_with(value, "cmdline") == []
    assert _processes_with(value, "environ")  # what is looked for is found where it may be
    world("cancel", job)
    until(lambda: not world.left(), "the container is gone")
    kept = [path for path in world.folder.rglob("*") if path.is_file() and value.encode() in _content(path)]
    # podman's database does not overwrite what it removes. It is the account's own, as docs/secrets.md says.
    assert {path.name for path in kept} <= {"bolt_state.db", "db.sql"}
    assert all(path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0 for path in kept)


def _processes_with(value, name):
    return [path for path in glob.glob(f"/proc/[0-9]*/{name}") if value.encode() in _content(path)]


def _content(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended, or was removed
        return b""


def test_exec_goes_into_the_image(world):
    job = running(world, "--", "sh", "-c", "echo ready; exec sleep 3000")
    assert world("exec", job, "--", "cat", "/made-by").stdout == "the image\n"
    assert world("exec", job, "--", "cat", input="typed").stdout == "typed"
    assert world("exec", job, "--", "sh", "-c", "exit 5", code=5).stdout == ""
    typed = f"{sys.executable} -m phalanx.app.cli exec {job} -- sh -c 'test -t 0 && cat /made-by'"
    assert "the image" in world.call("script", "-qec", typed, "/dev/null").stdout  # `script` gives it a terminal
    world("cancel", job)
    until(lambda: world.left() == [], "nothing is left")


def test_without_a_lease_the_container_stands_still_and_goes_on_with_the_next_one(world):
    counts = "echo ready; while true; do echo x >>counted; sleep 0.1; done"
    job = running(world, "--", "sh", "-c", counts)
    head = json.loads((world.home / "head.json").read_text())["pid"]
    counted = world.work / "counted"

    def grows():
        before = counted.stat().st_size
        time.sleep(1.0)
        return counted.stat().st_size > before

    os.kill(head, signal.SIGSTOP)
    try:
        until(lambda: not grows(), "it stands still")
    finally:
        os.kill(head, signal.SIGCONT)
    until(grows, "it goes on")
    assert world.json("show", job)["job"]["attempts"] == 1
    world("cancel", job)
    until(lambda: world.left() == [], "nothing is left")


def test_supervisor_that_is_killed_leaves_no_container_once_the_next_is_there(world):
    job = running(world, "--", "sh", "-c", "echo ready; exec sleep 3000")
    living = records.read(str(world.home / "nodes" / "n0"))
    assert living is not None
    before = set(world.podman("ps", "--all", "--format", "{{.Names}}").split())
    os.kill(living.identity.pid, signal.SIGKILL)
    until(lambda: not before & set(world.podman("ps", "--all", "--format", "{{.Names}}").split()), "it is swept")
    world("cancel", job)
    until(lambda: world.json("show", job)["job"]["state"] == "cancelled", "it is cancelled")
    until(lambda: world.left() == [], "nothing is left")


def submitted(world, text, *words):
    (world.work / "job.sh").write_text(text)
    return world("submit", "--quiet", *words, "job.sh").stdout.strip()


def ended(world, job):
    until(lambda: world.json("show", job)["job"]["state"] in {"succeeded", "failed", "cancelled"}, f"job {job} ends")
    return world("logs", job).stdout


STEP = f"srun --container-image={IMAGE}"


def test_steps_of_a_script_run_in_the_image_with_the_jobs_folders_and_variables(world):
    (world.work / "beside.txt").write_text("beside\n")
    (world.work / "data").mkdir(exist_ok=True)
    (world.work / "data" / "in.txt").write_text("mounted\n")
    text = f"""#!/bin/bash
#SBATCH -n 2
export MANY=$'x\\ny'
{STEP} --label sh -c 'cat /made-by beside.txt; echo "$SLURM_PROCID $MANY"; echo kept >"$PHALANX_OUTPUT_DIR/step-$SLURM_PROCID"'
{STEP} -n 1 --container-mounts={world.work}/data:/mnt/data:ro sh -c 'cat /mnt/data/in.txt; touch /mnt/data/x || echo read only'
{STEP} -n 1 sh -c 'grep -e NoNewPrivs -e CapBnd /proc/self/status; readlink /proc/self/ns/net'
readlink /proc/self/ns/net
{STEP} -n 1 sh -c 'exit 7'; echo "code $?"
{STEP} -n 1 sh -c no-such-program; echo "code $?"
"""
    job = submitted(world, text)
    lines = ended(world, job).splitlines()
    for rank in range(2):
        assert {f"{rank}: the image", f"{rank}: beside", f"{rank}: {rank} x", f"{rank}: y"} <= set(lines)
    assert {"mounted", "read only", "NoNewPrivs:\t1", "code 7", "code 127"} <= set(lines), lines
    bound = next(line.split()[1] for line in lines if line.startswith("CapBnd"))
    assert int(bound, 16) < (1 << 32), "podman's own short list of capabilities"
    assert len({line for line in lines if line.startswith("net:")}) == 1, "the network is the node's"
    world("get", job, "outputs")
    assert {"step-0", "step-1"} <= set(os.listdir(world.work / "outputs"))
    assert world.left() == []


@pytest.mark.parametrize("implementation", ["openmpi", "mpich"])
def test_mpi_programs_of_a_step_in_the_image_are_one_world(world, implementation):
    if shutil.which(f"mpicc.{implementation}") is None:
        pytest.skip(f"mpicc.{implementation} is not installed: make mpi-tools")
    (world.work / "ring.c").write_text(PROGRAM)
    subprocess.run([f"mpicc.{implementation}", str(world.work / "ring.c"), "-o", str(world.work / "ring")], check=True)
    here = ",".join(f"{folder}:{folder}:ro" for folder in ("/usr", "/lib", "/lib64", "/etc") if os.path.exists(folder))
    text = f"#!/bin/bash\n#SBATCH -n 2 --time=3\n{STEP} --container-mounts={here} sh -c 'cat /made-by; exec ./ring'\n"
    lines = ended(world, submitted(world, text)).splitlines()
    assert {"the image", "rank 0 of 2, sum 1, node 0", "rank 1 of 2, sum 1, node 0"} <= set(lines), lines


def test_a_script_with_an_image_runs_in_it_itself(world):
    (world.work / "beside.txt").write_text("beside\n")
    text = f'#!/bin/sh\n#SBATCH --container-image={IMAGE}\ncat /made-by beside.txt; echo "$SLURM_JOB_ID $1"; exit 3\n'
    (world.work / "job.sh").write_text(text)
    job = world("submit", "--quiet", "job.sh", "word").stdout.strip()
    assert ended(world, job) == f"the image\nbeside\n{job} word\n"
    assert world.json("show", job)["job"]["state"] == "failed"
    assert world.left() == []


def test_a_step_whose_srun_is_killed_leaves_no_container_while_the_script_goes_on(world):
    text = f"""#!/bin/bash
#SBATCH -n 1
{STEP} sh -c 'trap "" TERM; echo ready; while true; do sleep 1; done' & srun=$!
while [ -z "$(podman ps --quiet)" ]; do sleep 0.2; done
kill -KILL $srun; wait
while [ -n "$(podman ps --all --quiet)" ]; do sleep 0.2; done
echo gone; exec sleep 3000
"""
    job = submitted(world, text)
    until(lambda: "gone" in world("logs", job).stdout, "its container is gone")
    assert world.left() == []
    world("cancel", job)
    ended(world, job)


def test_cancel_of_a_script_leaves_no_container_of_its_steps(world):
    job = submitted(
        world, f"#!/bin/bash\n#SBATCH -n 1\n{STEP} sh -c 'trap \"\" TERM; echo ready; while true; do sleep 1; done'\n"
    )
    until(lambda: "ready" in world("logs", job).stdout, "the step runs")
    assert len(world.podman("ps", "--quiet").split()) == 1
    world("cancel", job)
    ended(world, job)
    until(lambda: world.left() == [], "nothing is left")


def test_image_that_nobody_has_fails_the_job_in_one_line(world):
    done = world("run", "--image", "no-registry-here/px-none:1", "--", "true", code=1)
    assert "image no-registry-here/px-none:1 cannot be pulled: " in done.stderr
    assert world.json("show", world.last())["job"]["attempts"] == 1


@pytest.mark.skipif(not shutil.which("docker-registry"), reason="needs docker-registry: make image-tools")
def test_image_is_pulled_once_and_known_by_its_digest(world):
    config = world.folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {world.folder}/registry\nhttp:\n  addr: 127.0.0.1:{world.registry}\n"
    )
    with open(world.folder / "registry.out", "wb") as out, contextlib.ExitStack() as ends:
        registry = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=out, stderr=out)
        ends.callback(registry.wait)
        ends.callback(registry.kill)
        name = f"127.0.0.1:{world.registry}/px"
        until(
            lambda: (
                world.call(
                    PODMAN, "push", "-q", "--digestfile", str(world.folder / "digest"), IMAGE, f"{name}:1", code=None
                ).returncode
                == 0
            ),
            "it is pushed",
        )
        image = f"{name}@{(world.folder / 'digest').read_text()}"
        assert world("run", "--image", image, "--", "cat", "/made-by").stdout == "the image\n"
        assert "Trying to pull" in world("logs", world.last(), "--rank", "supervisor").stdout
        assert world("run", "--image", image, "--", "cat", "/made-by").stdout == "the image\n"
        assert "Trying to pull" not in world("logs", world.last(), "--rank", "supervisor", code=None).stdout
        assert "manifest unknown" in world("run", "--image", f"{name}:2", "--", "true", code=1).stderr
