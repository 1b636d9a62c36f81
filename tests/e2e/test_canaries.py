"""Fifty secrets in a real head with real supervisors, all at debug level: whoever has no right to one finds it nowhere.

Each canary is random, has a name, and is planted where such a secret comes in: tokens, variables, keys, what is typed, what is sent by
mistake. Then everything that is written, answered, or seen in /proc is searched, and the test fails by the canary's name.
"""

# mypy: disable-error-code="arg-type, var-annotated"

import base64
import contextlib
import http.client
import json
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.cluster import free_port
from phalanx.client import Client
from phalanx.core.access.node_tokens import node_token
from phalanx.core.errors import PhalanxError
from tests.canaries import DATABASE, stands_in
from tests.e2e.test_cli_head import PYTHON, Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

VARIABLES = [
    "WANDB_API_KEY",
    "HF_TOKEN",
    "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GITHUB_TOKEN",
    "NPM_TOKEN",
    "PGPASSWORD",
    "REDIS_PASSWORD",
    "SLACK_WEBHOOK",
    "SSH_PASSPHRASE",
    "VAULT_TOKEN",
    "STRIPE_KEY",
    "MY_SECRET",
    "DOCKER_AUTH",
]
RANK = """
import hashlib, os, sys, time
names = sys.argv[2].split(",")
print("hash", hashlib.sha256("".join(os.environ[name] for name in names).encode()).hexdigest(), flush=True)
open(os.path.join(os.environ["PHALANX_OUTPUT_DIR"], "done"), "w").close()
if sys.argv[1] == "stay":
    time.sleep(300)
if sys.argv[1] == "fail":
    raise RuntimeError("as planned")
if sys.argv[1] == "die":
    os.kill(os.getpid(), 9)
"""


class Canaries(dict):
    """Secrets by name."""

    def make(self, name, form="{}"):
        self[name] = secrets.token_hex(16)
        return form.format(self[name])

    def found_in(self, content, names=None):
        """Names of those that stand in some bytes: as they are, in base64, or percent-encoded."""
        wanted = self if names is None else names
        return [name for name in wanted if stands_in(self[name].encode(), content)]


class Watch(threading.Thread):
    """Reads the arguments of every process again and again."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen, self.over = set(), threading.Event()
        self.start()

    def run(self):
        while not self.over.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    self.seen.add(path.read_bytes())


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("canaries"))
    shell.env["PHALANX_LOG"] = "DEBUG"
    (shell.work / "rank.py").write_text(RANK)
    shell("up", "--virtual", "2x2", "--port", str(free_port()), "--listen", f"127.0.0.2:{free_port()}")
    yield shell
    shell("down", "--cancel-jobs")


def raw(url, method, path, headers=None, body=None):
    where = urlsplit(url)
    link = http.client.HTTPConnection(where.hostname, where.port, timeout=20)
    try:
        link.request(method, path, body=body, headers=headers or {})
        reply = link.getresponse()
        return reply.status, reply.read()
    finally:
        link.close()


def test_fifty_secrets_appear_nowhere(shell, tmp_path):
    canaries, watch, answers = Canaries(), Watch(), {}
    url = json.loads((shell.home / "head.json").read_text())["url"]
    token = (shell.home / "token").read_text().strip()
    admin = Client(url, token)
    viewer, other = plant_tokens(canaries, shell, admin, url, token)
    jobs = plant_jobs(canaries, shell, admin)
    plant_typed(canaries, admin, jobs["stay"])
    answers["refusals of mistakes"] = plant_mistakes(canaries, url, token)
    assert len(canaries) >= 50, len(canaries)

    crash(shell, admin, jobs)
    for who, secret in (("viewer", viewer), ("another user", other), ("nobody", None)):
        answers |= {f"{who}: {path}": reply for path, reply in everything(url, secret, jobs.values())}
    answers |= {f"owner: {path}": reply for path, reply in everything(url, token, jobs.values())}
    for words in (
        ["audit"],
        ["audit", "--json"],
        ["ps", "-a"],
        ["tokens"],
        ["show", jobs["fail"]],
        ["why", jobs["stay"]],
        ["doctor"],
    ):
        answers[f"phalanx {' '.join(words)}"] = said(shell, *words)
    admin.cancel(jobs["stay"])
    shell.until(jobs["stay"], "cancelled")
    watch.over.set()

    found = {place: names for place, reply in answers.items() if (names := canaries.found_in(reply))}
    found |= {f"argv: {argv[:80]!r}": names for argv in watch.seen if (names := canaries.found_in(argv))}
    found |= files_with(canaries, shell)
    assert found == {}
    print(f"{len(canaries)} canaries, {len(answers)} answers, {len(watch.seen)} command lines")
    assert len(watch.seen) > 20
    assert len(answers) > 100
    assert sum(len(reply) for reply in answers.values()) > 20_000


def plant_tokens(canaries, shell, admin, url, token):
    """Tokens and keys as the head makes them: those are the canaries."""
    canaries["the admin's token"] = token
    secret = bytes.fromhex((shell.home / "node_secret").read_text())
    canaries["the head's secret"] = secret.hex()
    canaries["the CA's key"] = (shell.home / "tls" / "ca.key").read_text().splitlines()[1]
    canaries["the key of the head's certificate"] = (shell.home / "tls" / "head.key").read_text().splitlines()[1]
    for node in ("n0", "n1"):
        canaries[f"the token of {node}"] = node_token(secret, node).rpartition(".")[2]
    admin.put_user("vic", role="viewer")
    admin.put_user("bob", role="user")
    made = [admin.make_token(user=user).secret for user in ("vic", "bob")]
    for number, one in enumerate(made):
        canaries[f"token {number} of others"] = one
    for number in range(4):
        fresh = admin.make_token(note="laptop", expires="1h")
        canaries[f"user's token {number}"] = fresh.secret
        if number % 2:
            admin.revoke_token(fresh.token.id)
            with contextlib.suppress(PhalanxError):
                Client(url, fresh.secret).me()
    return made


def plant_jobs(canaries, shell, admin):
    """Variables of jobs that end in every way."""
    env = {name: canaries.make(f"variable {name}") for name in VARIABLES}
    env |= {
        "DATABASE_URL": canaries.make("password in a URL", "postgresql://ada:{}@db.example/x"),
        "S3_URL": canaries.make("key in a URL", "s3://AKIA:{}@bucket/path?x=1"),
        "PIP_INDEX_URL": canaries.make("password of an index", "https://ada:{}@pypi.example/simple"),
        "PRIVATE_KEY": canaries.make("private key", "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----"),
        "QUOTED": canaries.make("quoted", "a 'b\" $(c) {} \\ \u00fc"),
        "JSON": canaries.make("in JSON", '{{"auths": {{"registry.example": {{"auth": "{}"}}}}}}'),
    }
    jobs = {}
    for kind in ("fail", "stay", "die", "ok"):
        spec = {
            "run": [PYTHON, "rank.py", kind, ",".join(env)],
            "env": env,
            "workdir": str(shell.work),
            "gpus": 1,
            "name": f"job-{kind}",
            "retry": 1,
        }
        jobs[kind] = admin.submit(spec).id
    held = {
        "run": "true",
        "env": {"HELD": canaries.make("variable of a held job")},
        "workdir": "/tmp",
        "gpus": 1,
        "hold": True,
    }
    jobs["held"] = admin.submit(held).id
    gone = {
        "run": "true",
        "env": {"GONE": canaries.make("variable of a job in no folder")},
        "workdir": "/nowhere/at-all",
        "gpus": 1,
    }
    jobs["no folder"] = admin.submit(gone).id
    never = {
        "run": ["/no/such/program"],
        "env": {"NEVER": canaries.make("variable of no program")},
        "workdir": "/tmp",
        "gpus": 1,
    }
    jobs["no program"] = admin.submit(never).id
    # As a user types it: -e NAME takes the value from the environment, so that it stands in no command line.
    shell.env["TYPED_SECRET"] = canaries.make("variable by -e NAME")
    typed = shell("submit", "--gpus", "1", "-e", "TYPED_SECRET", "--", "sh", "-c", 'test -n "$TYPED_SECRET"').stdout
    jobs["typed"] = typed.split()[1] if typed.startswith("job") else admin.jobs().jobs[0].id
    (shell.work / "job.yaml").write_text(
        f"run: 'true'\ngpus: 1\nenv:\n  FILE_KEY: {canaries.make('variable in a job file')}\n"
    )
    shell("submit", "job.yaml")
    shell.until(jobs["ok"], "succeeded")
    shell.until(jobs["fail"], "failed")
    shell.until(jobs["die"], "failed")
    return jobs


def plant_typed(canaries, admin, job_id):
    """What is typed into a session, and what the command prints there."""
    for _ in range(300):
        if admin.job(job_id).job.attempt_state == "running":
            break
        time.sleep(0.1)
    text = canaries.make("typed into a session") + "\n"
    with admin.exec(job_id, ["cat"]) as session:
        session.write(text.encode())
        session.end_input()
        assert session.read().decode() == text


def plant_mistakes(canaries, url, token):
    """What is sent to the wrong place: passwords, tokens of others, queries. The refusals must not say it again."""
    bearer = {"Authorization": f"Bearer {token}"}
    said = []
    mistakes = [
        ("GET", "/v1/me", {"Authorization": canaries.make("unknown token", "Bearer {}")}, None),
        (
            "GET",
            "/v1/me",
            {"Authorization": "Basic " + base64.b64encode(canaries.make("basic password", "ada:{}").encode()).decode()},
            None,
        ),
        ("GET", "/v1/me", {"Authorization": canaries.make("token without its word")}, None),
        ("GET", "/v1/me", {"Authorization": canaries.make("join token", "Bearer phxj.1.{}")}, None),
        ("GET", "/v1/me", {"Authorization": canaries.make("node token", "Bearer phxn.n0.{}")}, None),
        ("GET", canaries.make("token in a query", "/v1/me?token={}"), {}, None),
        ("GET", canaries.make("token in a query of one who may", "/v1/jobs?access_token={}"), bearer, None),
        ("GET", "/v1/me", {"Cookie": canaries.make("cookie", "session={}"), **bearer}, None),
        ("GET", "/v1/me", {"X-Api-Key": canaries.make("header of another API"), **bearer}, None),
        (
            "POST",
            "/v1/jobs",
            bearer,
            json.dumps({"run": "true", "env": {"KEY": [canaries.make("variable that is a list")]}}),
        ),
        (
            "POST",
            "/v1/jobs",
            bearer,
            json.dumps({"run": "true", "env": {"KEY": canaries.make("variable with NUL", "{}\0")}}),
        ),
        (
            "POST",
            "/v1/jobs",
            bearer,
            json.dumps({"run": "true", "env": {"0 KEY": canaries.make("variable with a bad name")}}),
        ),
        (
            "POST",
            "/v1/jobs",
            bearer,
            json.dumps({"run": "true", "env": {"RANK": canaries.make("variable that is ours")}}),
        ),
        ("POST", "/v1/jobs", bearer, canaries.make("body that is no JSON", '{{"run": "true", "env": {{"KEY": "{}"')),
        ("POST", "/v1/jobs", {}, json.dumps({"env": {"KEY": canaries.make("variable without a token")}})),
        ("POST", "/v1/tokens", bearer, json.dumps({"secret": canaries.make("secret in a field that is none")})),
        ("PUT", "/v1/users/ada", bearer, json.dumps({"role": "user", "password": canaries.make("password of a user")})),
    ]
    for method, path, headers, body in mistakes:
        status, reply = raw(url, method, path, headers, body)
        assert status < 500, (path, reply)
        said.append(reply)
    return b"".join(said)


def crash(shell, admin, jobs):
    """A supervisor and the head die without a word, and come back."""
    engine = json.loads((shell.home / "nodes" / "n1" / "engine.json").read_text())
    with contextlib.suppress(ProcessLookupError, KeyError):
        os.kill(engine["pid"], signal.SIGKILL)
    time.sleep(1.0)
    os.kill(json.loads((shell.home / "head.json").read_text())["pid"], signal.SIGKILL)
    for _ in range(100):
        try:
            shell("up")
            break
        except AssertionError:
            time.sleep(0.2)
    assert {job.id for job in admin.jobs(limit=100).jobs} >= set(jobs.values())


def everything(url, secret, jobs):
    """Every reading route, as its caller gets it. Streams are read for what they begin with."""
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    paths = [
        "/v1/jobs?limit=100",
        "/v1/nodes",
        "/v1/overview",
        "/v1/queues",
        "/v1/users",
        "/v1/projects",
        "/v1/tokens",
        "/v1/me",
        "/metrics",
        "/v1/story?limit=500",
        "/v1/audit?limit=1000",
        "/v1/audit/verify",
        "/v1/profile",
        "/v1/reservations",
        "/v1/health",
        "/v1/ca",
        "/v1/nodes/n0",
        "/v1/openapi.json",
    ]
    for job_id in jobs:
        paths += [
            f"/v1/jobs/{job_id}{noun}"
            for noun in ("", "/why", "/story", "/receipt", "/steps", "/logs", "/logs?rank=supervisor", "/files")
        ]
    for path in paths:
        status, reply = raw(url, "GET", path, headers)
        assert status < 500, (path, reply)
        yield path, reply


def said(shell, *words):
    """What a command prints, however it ends."""
    import subprocess

    done = subprocess.run(
        shell.argv(*words), cwd=shell.work, env=shell.env, capture_output=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


def files_with(canaries, shell):
    """Files with canaries in them, but for those that hold secrets because they are for that, and are their owner's alone."""
    own = {
        "token": "the admin's token",
        "node_secret": "the head's secret",
        "tls/ca.key": "the CA's key",
        "tls/head.key": "the key of the head's certificate",
    }
    variables = [
        name
        for name in canaries
        if "variable" in name
        or name in ("password in a URL", "key in a URL", "password of an index", "private key", "quoted", "in JSON")
    ]
    found = {}
    assert shell.home.stat().st_mode & 0o077 == 0
    for path in sorted(shell.home.rglob("*")):
        if not path.is_file():
            continue
        place = str(path.relative_to(shell.home))
        names = canaries.found_in(path.read_bytes())
        if place in own:
            assert path.stat().st_mode & 0o077 == 0, place
            names = [name for name in names if name != own[place]]
        if place in DATABASE:  # in the head's own folder, for its owner alone; of tokens there are only hashes
            assert path.stat().st_mode & 0o077 == 0, place
            names = [name for name in names if name not in variables]
        if names:
            found[place] = names
    return found


def test_the_search_would_find_one(shell):
    """The same scanner on a place where a canary does stand."""
    canaries = Canaries()
    canaries["planted"] = secrets.token_hex(16)
    (shell.home / "left-behind").write_text(f"oops {canaries['planted']}")
    try:
        assert files_with(canaries, shell) == {"left-behind": ["planted"]}
    finally:
        (shell.home / "left-behind").unlink()
    assert canaries.found_in(base64.b64encode(canaries["planted"].encode())) == ["planted"]
