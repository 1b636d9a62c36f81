"""ssh, scp, rsync and git reach a job over `sshd -i`, without an open port; other users, other names and nodes without sshd are refused."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys

import pytest

from benchmarks.cluster import ROOT, cluster, wait_until
from phalanx.client import Client
from tests.e2e.owners_rig import Cluster, unfit

TOOLS = ("ssh", "scp", "rsync", "git", "ssh-keygen")
_MISSING = [name for name in TOOLS if not shutil.which(name)] + ([] if os.path.exists("/usr/sbin/sshd") else ["sshd"])

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {' '.join(_MISSING)} (make ssh-tools)"),
]
ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture(scope="module")
def head():
    with cluster("1x2", revive_s=0.5) as made:
        yield made


@pytest.fixture(scope="module")
def environment(head, tmp_path_factory):
    return {
        **os.environ,
        "PHALANX_HOME": head.home,
        "PYTHONPATH": os.path.join(ROOT, "src"),
        "XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("config")),
    }


@pytest.fixture(scope="module")
def job(head, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job folder")
    job_id = head.submit(name="ssh", run=["sleep", "600"], gpus=1, workdir=str(folder), env={"MINE": "it's two words"})
    head.wait_for_state(job_id, "running")
    return job_id, folder


@pytest.fixture(scope="module")
def settings(environment):
    line = phalanx(environment, "config", "ssh", "--print")
    return line.stdout.split('"')[1]


def phalanx(environment, *words, **more):
    command = [sys.executable, "-m", "phalanx.app.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False, **more)


def run(environment, *words, **more):
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False, **more)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_ssh_runs_in_the_environment_and_folder_of_the_job(environment, job):
    job_id, folder = job
    done = phalanx(
        environment, "ssh", job_id, "--", 'echo "$MINE"; pwd; echo $CUDA_VISIBLE_DEVICES; cat; exit 7', input="typed"
    )
    assert done.stdout.splitlines()[:2] == ["it's two words", str(folder)], done.stderr
    assert done.stdout.endswith("typed")
    assert (done.returncode, done.stderr) == (7, "")


def test_scp_rsync_and_git_carry_files_both_ways(environment, job, settings, tmp_path):
    job_id, folder = job
    host, data = f"{ME}@{job_id}.phalanx", os.urandom(3_000_000)
    (tmp_path / "sent").write_bytes(data)
    run(environment, "scp", "-q", "-F", settings, str(tmp_path / "sent"), f"{host}:sent")
    assert (folder / "sent").read_bytes() == data
    run(environment, "scp", "-q", "-F", settings, f"{host}:sent", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "file").write_bytes(data)
    run(environment, "rsync", "-a", "-e", f"ssh -F {settings}", f"{tmp_path}/tree/", f"{host}:tree/")
    assert (folder / "tree" / "sub" / "file").read_bytes() == data
    git = {**environment, "GIT_SSH_COMMAND": f"ssh -F {settings}"}
    run(git, "git", "init", "-q", "--bare", str(folder / "bare"))
    work = tmp_path / "work"
    run(git, "git", "init", "-q", str(work))
    run(
        git,
        "git",
        "-C",
        str(work),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "first",
    )
    run(git, "git", "-C", str(work), "push", "-q", f"{host}:bare", "HEAD:refs/heads/main")
    run(git, "git", "clone", "-q", "-b", "main", f"{host}:bare", str(tmp_path / "clone"))
    assert run(git, "git", "-C", str(tmp_path / "clone"), "log", "--format=%s") == "first\n"


def test_a_terminal_and_a_tunnel_work_and_no_sshd_listens(environment, job, settings):
    job_id, _ = job
    host = f"{ME}@{job_id}.phalanx"
    assert "/dev/pts/" in run(environment, "ssh", "-tt", "-F", settings, host, "tty", stdin=subprocess.DEVNULL)
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = ["ssh", "-F", settings, "-W", f"127.0.0.1:{server.getsockname()[1]}", host]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tunnel:
            line, _ = server.accept()
            with line:
                line.sendall(b"through")
            assert tunnel.stdout
            assert tunnel.stdout.read(7) == b"through"
            inodes = sockets_of_sshd()
            tunnel.kill()
    assert inodes
    assert not inodes & listening()


def test_the_host_key_of_another_is_refused(environment, job, settings, tmp_path):
    """The job's key is known before ssh asks for it; a server with another key gets nothing."""
    job_id, _ = job
    hosts = os.path.join(os.path.dirname(settings), "known_hosts")
    name = f"{job_id}.phalanx"
    run(environment, "ssh", "-F", settings, f"{ME}@{name}", "true")
    with open(hosts, encoding="utf-8") as file:
        assert name in {line.split()[0] for line in file}
    run(environment, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
    wrong = tmp_path / "wrong"
    wrong.write_text(f"{name} {(tmp_path / 'other.pub').read_text()}")
    command = ["ssh", "-F", settings, "-o", f"UserKnownHostsFile={wrong}", f"{ME}@{name}", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 255
    assert "verification failed" in done.stderr


def test_another_user_and_another_name_are_refused_in_words(head, environment, job, settings):
    job_id, _ = job
    client = Client(home=head.home)
    client.put_user("eve", role="user")
    token = client.make_token(user="eve").secret
    eve = {**environment, "PHALANX_URL": f"http://127.0.0.1:{head.port}", "PHALANX_TOKEN": token}
    for words in (("ssh", job_id, "true"), ("proxy", f"{job_id}.phalanx"), ("port-forward", job_id, "0:80")):
        done = phalanx(eve, *words)
        assert done.returncode
        assert "may not" in done.stderr, done.stderr
    done = phalanx(environment, "proxy", "--user", "nobody-else", f"{job_id}.phalanx")
    assert f"job {job_id} runs as {ME}, not nobody-else" in done.stderr


def test_a_node_without_sshd_says_what_to_install(head, environment, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("sh", "sleep", "id"):
        os.symlink(str(shutil.which(name)), tmp_path / "bin" / name)
    job_id = head.submit(name="bare", run=["sleep", "600"], gpus=1, workdir=str(tmp_path))
    head.wait_for_state(job_id, "running")
    command = ["sh", "-c", 'PATH=$1; shift; exec sh -c "$@"', "-", str(tmp_path / "bin")]
    with open(os.path.join(ROOT, "src/phalanx/cli/sessions/ssh_server.sh"), encoding="utf-8") as file:
        script = file.read().replace(":/usr/sbin:/sbin:/usr/local/sbin", "")
    done = phalanx(environment, "exec", job_id, "--", *command, script, "phalanx", "key")
    assert done.stdout == (
        "phalanx-ssh-error there is no sshd here: install the package openssh-server on the node, or in the job's image\n"
    )
    assert done.returncode == 127
    head.call("POST", f"/v1/jobs/{job_id}/cancel", {})


def test_config_ssh_includes_one_file_once_and_keeps_what_was_there(environment, tmp_path):
    home = {**environment, "HOME": str(tmp_path)}
    (tmp_path / ".ssh").mkdir()
    config = tmp_path / ".ssh" / "config"
    config.write_bytes(b"# J\xfcrgen's\nHost mine\n    Port 2222\n")  # not UTF-8
    assert "now includes" in phalanx(home, "config", "ssh").stdout
    again = phalanx(home, "config", "ssh")
    assert "already includes" in again.stdout
    assert f"use ssh -F {config}" in again.stderr  # this HOME is not that of the account
    assert b"# J\xfcrgen's\n" in config.read_bytes()
    text = config.read_text(encoding="latin-1")
    assert text.count("Include ") == 1
    assert text.endswith("Host mine\n    Port 2222\n")
    assert run(home, "ssh", "-F", str(config), "-G", "17.phalanx").count("phalanx.app.cli proxy") == 1


def test_the_session_leaves_no_process_and_no_key_behind(environment, job, settings):
    job_id, _ = job
    run(environment, "ssh", "-F", settings, f"{ME}@{job_id}.phalanx", "true")
    listed = 'ls "$(dirname "$PHALANX_LEASE_PAGE")"'
    wait_until(
        lambda: "ssh-" not in phalanx(environment, "exec", job_id, "--", "sh", "-c", listed).stdout, "it is removed"
    )


def test_a_server_without_a_private_folder_of_the_job_leaves_nothing_in_that_of_the_machine(tmp_path):
    """As root, every folder is writable; so there is none. The script ends at once: no client writes."""
    with open(os.path.join(ROOT, "src/phalanx/cli/sessions/ssh_server.sh"), encoding="utf-8") as file:
        script = file.read()
    told = {**os.environ, "PHALANX_LEASE_PAGE": str(tmp_path / "gone" / "page"), "TMPDIR": str(tmp_path)}
    command = ["sh", "-c", script, "phalanx", "ssh-ed25519 AAAA"]
    done = subprocess.run(command, env=told, input="", capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith(f"phalanx-ssh {ME} ssh-ed25519 "), done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(unfit() != "", reason=unfit())
def test_a_job_of_another_account_is_reached_as_that_account_by_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    owners = Cluster()
    try:
        owners.up()
        job_id = owners.submit("ada", "sleep 600")
        wait_until(lambda: owners.state_of(job_id) == "running", "the job runs")
        seen = owners.phalanx("ada", "ssh", job_id, "--", "id -un; pwd; grep NoNewPrivs /proc/self/status").stdout
        assert seen.split() == ["ada", str(owners.home("ada")), "NoNewPrivs:", "1"]
        refused = owners.phalanx("ben", "ssh", job_id, "--", "id", check=False)
        assert "ben may not change it" in refused.stderr
        other = owners.phalanx("ada", "proxy", "--user", "root", f"{job_id}.phalanx", check=False)
        assert f"job {job_id} runs as ada, not root" in other.stderr
    finally:
        owners.down()


def sockets_of_sshd():
    """The inodes of all sockets that processes of sshd have."""
    seen = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read().startswith((b"sshd:", b"/usr/sbin/sshd")):
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        seen.add(os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[").rstrip("]"))
    return seen


def listening():
    """The inodes of all listening sockets."""
    seen = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}", encoding="utf-8") as file:
            seen |= {line.split()[9] for line in file if " 0A " in line}
    return seen
