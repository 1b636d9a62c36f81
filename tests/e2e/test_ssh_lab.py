"""ssh, scp, rsync and git from a client that reaches only the head, to a job on a node that nobody can connect to: three hosts of the lab.

The node refuses all connections from outside. Its supervisor listens for link tests of other nodes, as on any joined node; nothing else listens, and
no session adds a port.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

import json
import subprocess
import sys

import pytest

from benchmarks.cluster import wait_until
from tests.e2e.test_ssh import _MISSING
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.typed import join_words

WHY_NOT = why_not() or (f"not installed: {' '.join(_MISSING)} (make ssh-tools)" if _MISSING else "")
pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "the lab"),
]
PHALANX = [sys.executable, "-P", "-m", "phalanx.app.cli"]
HANG_S = 120.0
HEAD, NODE, CLIENT = "h0", "h1", "h2"


def told(lab, host, *words, variables=()):
    command = lab.command(host, ["env", *variables, *words], folder="/home/lab")
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, f"{host}: {words}\n{done.stdout}{done.stderr}"
    return done.stdout


def listening(lab, host):
    """Each socket of a host that waits for others, by TCP or UDP."""
    return lab.run(host, ["ss", "-H", "-l", "-t", "-u", "-n"]).splitlines()


def peers(lab, host):
    """The other ends of a host's TCP connections."""
    return {line.split()[-1] for line in lab.run(host, ["ss", "-H", "-t", "-n"]).splitlines()}


def test_ssh_scp_rsync_and_git_reach_a_job_on_a_node_without_an_open_port():
    with Lab(size=3, gpus=0) as lab:
        said = told(lab, HEAD, *PHALANX, "up", "--listen", lab.host(HEAD).address, "--virtual", "1x1")
        line = join_words(said)
        url, fingerprint = f"https://{lab.host(HEAD).address}:7600", line[5]
        told(lab, NODE, *PHALANX, *line, "--virtual", "1")
        for one, other in ((CLIENT, NODE), (NODE, CLIENT)):
            lab.run(one, ["ip", "route", "add", "unreachable", f"{lab.host(other).address}/32"])
        assert "No route to host" in lab.run(
            CLIENT, ["sh", "-c", f"ip route get {lab.host(NODE).address} 2>&1"], check=False
        )
        lab.run(NODE, ["iptables", "-A", "INPUT", "!", "-i", "lo", "-p", "tcp", "--syn", "-j", "REJECT"])
        (probes,) = listening(lab, NODE)
        port = probes.split()[4].rpartition(":")[2]
        knock = f"echo >/dev/tcp/{lab.host(NODE).address}/{port}"
        assert "refused" in lab.run(HEAD, ["bash", "-c", f"({knock}) 2>&1"], check=False)
        token = told(lab, HEAD, *PHALANX, "tokens", "add", "--expires", "1d").split()[-1]
        client = (f"PHALANX_URL={url}", f"PHALANX_FINGERPRINT={fingerprint}", f"PHALANX_TOKEN={token}")

        def typed(*words):
            return told(lab, CLIENT, *words, variables=client)

        typed("sh", "-c", "mkdir project; echo a program >project/program")
        given = ("--gpus", "1", "--nodelist", NODE, "--workdir", "/home/lab/project", "--", "sleep", "600")
        job = typed(*PHALANX, "submit", "--quiet", *given).split()[-1]
        wait_until(
            lambda: json.loads(typed(*PHALANX, "show", job, "--json"))["job"]["state"] == "running",
            "it runs",
            limit_s=60,
        )
        typed(*PHALANX, "config", "ssh")
        settings, host = "/home/lab/.ssh/config", f"root@{job}.phalanx"
        ssh = f"ssh -F {settings}"
        name, work, program = typed("ssh", "-F", settings, host, "hostname; pwd; cat program").splitlines()
        assert (name, program) == (NODE, "a program")

        # While a session is open: the node and the client talk to the head alone, and nothing new listens.
        with lab.start(
            CLIENT,
            ["env", *client, "ssh", "-F", settings, host, "echo open; cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as session:
            assert session.stdin
            assert session.stdout
            assert session.stdout.readline() == "open\n"
            assert "sshd" in lab.run(NODE, ["ps", "-eo", "args"])
            assert listening(lab, NODE) == [probes]
            assert peers(lab, NODE) == peers(lab, CLIENT) == {f"{lab.host(HEAD).address}:7600"}
            session.stdin.write("bytes")
            session.stdin.close()
            assert session.stdout.read() == "bytes"
            assert session.wait(HANG_S) == 0

        def digest(where, path):
            return lab.run(where, ["sha256sum", path]).split()[0]

        typed(
            "sh",
            "-c",
            "head -c 5000000 /dev/urandom >sent; mkdir -p tree/sub; cp sent tree/sub/file; ln -s sub/file tree/link",
        )
        typed("scp", "-q", "-F", settings, "sent", f"{host}:sent")
        typed("scp", "-q", "-F", settings, f"{host}:sent", "back")
        assert digest(CLIENT, "/home/lab/sent") == digest(NODE, f"{work}/sent") == digest(CLIENT, "/home/lab/back")
        typed("rsync", "-a", "-e", ssh, "tree/", f"{host}:tree/")
        assert digest(NODE, f"{work}/tree/sub/file") == digest(CLIENT, "/home/lab/sent")
        assert lab.run(NODE, ["readlink", f"{work}/tree/link"]) == "sub/file\n"

        typed("ssh", "-F", settings, host, "git init -q --bare repo.git")
        typed("git", "init", "-q", "-b", "main", "mine")
        typed(
            "sh",
            "-c",
            "cp sent mine/ && cd mine && git add sent && git -c user.name=a -c user.email=a@b commit -q -m first",
        )
        git = ("env", f"GIT_SSH_COMMAND={ssh}", "git")
        typed(*git, "-C", "mine", "push", "-q", f"{host}:repo.git", "main")
        assert lab.run(NODE, ["git", "-C", f"{work}/repo.git", "log", "--format=%s", "main"]) == "first\n"
        typed(*git, "clone", "-q", "-b", "main", f"{host}:repo.git", "again")
        assert digest(CLIENT, "/home/lab/again/sent") == digest(CLIENT, "/home/lab/sent")

        told(lab, NODE, *PHALANX, "down", "--cancel-jobs")
        told(lab, HEAD, *PHALANX, "down", "--cancel-jobs")
