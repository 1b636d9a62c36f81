"""Secrets in a real head with real supervisors: jobs get them, and nothing else on the machine has them, neither files nor arguments nor answers."""

# mypy: disable-error-code="arg-type, var-annotated"

import contextlib
import hashlib
import json
import secrets
import time

import pytest

from benchmarks.cluster import free_port, wait_until
from phalanx.client import Client
from phalanx.node.processes.proctable import process_environment, read_table
from tests.canaries import stands_in
from tests.e2e.test_canaries import Watch
from tests.e2e.test_cli_head import PYTHON, Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

LEAKY = """
import hashlib, os, sys, time
token, key = os.environ["HF_TOKEN"], os.environ["SSH_KEY"]
print("hash", hashlib.sha256((token + key).encode()).hexdigest(), flush=True)
print("whole", token, "again", token + token, flush=True)
print("cut " + token[:7], end="", flush=True)
time.sleep(0.3)
print(token[7:], flush=True)
sys.stderr.write(key + "\\n" + repr(key) + "\\n" + "".join(token) + "x\\n")
sys.stdout.write("ends with " + token[:-1])
sys.stdout.flush()
if sys.argv[1] == "stay":
    time.sleep(300)
raise RuntimeError(token)
"""
STEPS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=/dev/null
srun bash -c 'echo "step $SLURM_PROCID $(printf %s "$HF_TOKEN" | sha256sum)"; echo "$HF_TOKEN"'
"""


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def shell(tmp_path):
    shell = Shell(tmp_path)
    shell.env["PHALANX_LOG"] = "DEBUG"
    (shell.work / "leaky.py").write_text(LEAKY)
    (shell.work / "steps.sbatch").write_text(STEPS)
    shell("up", "--virtual", "2x1", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def test_a_secret_is_in_the_environment_of_its_job_and_nowhere_else(shell, tmp_path):
    token, after = (secrets.token_hex(16) for _ in range(2))
    lines = [secrets.token_hex(24) for _ in range(3)]
    key = "\n".join(lines)
    canaries, watch, admin = (token, after, *lines), Watch(), Client(home=str(shell.home))
    shell("secrets", "set", "HF_TOKEN", stdin=f"{token}\n")
    admin.put_secret("SSH_KEY", key, project=None)
    hook = f"json://me:{lines[0]}@127.0.0.1:9/{lines[1]}?+X-Key={token}"
    shell("secrets", "set", "CHAT_URL", stdin=f"{hook}\n")
    job = {"workdir": str(shell.work), "gpus": 2, "nodes": 2, "secrets": ["HF_TOKEN", "SSH_KEY"], "setup": "env >&2"}
    stay = admin.submit({**job, "run": [PYTHON, "leaky.py", "stay"], "notify": "$CHAT_URL"}).id
    output = until_said(admin, stay, "ends with ", count=2)
    assert output.count(f"hash {sha(token + key)}") == 2
    assert output.count("whole *** again ******") == output.count("cut ***\n") == 2
    holders = {row.pid for row in read_table().values() if held_by(row.pid, token)}
    assert holders
    assert holders <= set(shell.processes(PHALANX_JOB_ID=stay)), "only the processes of the job have it"
    refused = "notify: $CHAT_URL was not reached, trying again: it leads to an address that is not public"
    wait_until(
        lambda: refused in [line.text for line in admin.history(stay).history], "the head has tried to send to the URL"
    )
    search(
        canaries, {str(path): path.read_bytes() for path in shell.home.rglob("*") if path.is_file()}
    )  # its scratch too
    admin.cancel(stay)
    until(admin, stay, "cancelled")

    fail = admin.submit({**job, "run": [PYTHON, "leaky.py", "fail"], "setup": ""}).id
    until(admin, fail, "failed")
    assert "RuntimeError: ***" in said(admin, fail)
    shell("secrets", "set", "HF_TOKEN", stdin=f"{after}\n")
    assert admin.rotate_secrets_key().count == 3
    steps = shell("submit", "--secret", "HF_TOKEN", "steps.sbatch").stdout.split()[1]
    until(admin, steps, "succeeded")
    assert sorted(line.split()[2] for line in said(admin, steps).splitlines() if "step " in line) == [sha(after)] * 2
    backup = tmp_path / "backup"
    shell("backup", str(backup))

    answers = [shell(*words).stdout for words in (["show", stay, "--json"], ["audit", "--json"])]
    answers += [json.dumps(shell.job(one)) for one in (stay, fail, steps)] + [
        said(admin, one) for one in (stay, fail, steps)
    ]
    watch.over.set()
    files = [path for path in (*shell.home.rglob("*"), backup) if path.is_file()]
    search(canaries, {str(path): path.read_bytes() for path in files})
    search(canaries, {argv.decode(errors="replace"): argv for argv in watch.seen})
    search(canaries, {answer[:40]: answer.encode() for answer in answers})
    assert "secret HF_TOKEN of project default version 2" in answers[1]
    print(f"{len(canaries)} canaries, {len(files)} files, {len(watch.seen)} command lines: 0 found")

    held = admin.submit({"run": "true", "workdir": "/tmp", "hold": True, "secrets": ["SSH_KEY"]}).id
    assert admin.remove_secret("SSH_KEY", project=None).jobs == 1
    admin.release(held)
    until(admin, held, "failed")
    assert "secrets: secret SSH_KEY of project default was removed after" in shell.job(held)["job"]["detail"]


def search(canaries, content):
    """Look for each in each text."""
    assert [place for place, text in content.items() for one in canaries if stands_in(one.encode(), text)] == []


def held_by(pid, value):
    with contextlib.suppress(OSError):
        return any(value.encode() in one for one in process_environment(pid).values())
    return False


def said(admin, job_id):
    """All that the job's streams have."""
    return "".join(chunk.text for chunk in admin.logs(job_id).chunks)


def until_said(admin, job_id, text, count):
    limit_s = time.monotonic() + 60
    while (output := said(admin, job_id)).count(text) < count:
        assert time.monotonic() < limit_s, output
        time.sleep(0.1)
    return output


def until(admin, job_id, state):
    wait_until(lambda: admin.job(job_id).job.state == state, f"job {job_id} is {state}")
