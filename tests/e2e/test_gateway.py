"""The gateway as a process before a real head and real replicas of a stand-in engine."""

import asyncio
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from benchmarks.cluster import free_port
from tests.e2e import gateway_hostile
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
FILE = f"""
type: service
name: chat
run: exec {sys.executable} -m tests.fake_engine --port $PORT --chunks 20 --pause 0.01
env: {{PYTHONPATH: "{ROOT}"}}
gpus: 1
replicas: 0..3
ready: /health
"""


class Gateway:
    """A gateway process, and requests to it."""

    def __init__(self, shell, *options):
        self.shell = shell
        argv = shell.argv("gateway", "--port", "0", *options)
        self.errors = shell.work / "gateway.err"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                argv, cwd=shell.work, env=shell.env, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("gateway: "), (line, self.errors.read_text())
        self.url = line.split()[1].removesuffix("/v1")
        self.key = (shell.home / "token").read_text().strip()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    async def ask(self, session, body, *, key=None, path="/v1/chat/completions", **more):
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"} | more.pop("headers", {})
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with session.request(
            more.pop("method", "POST"), self.url + path, data=data, headers=headers, **more
        ) as answer:
            text = await answer.read()
            return answer.status, text, answer.headers

    async def chat(self, session, text, **more):
        status, body, _ = await self.ask(
            session, {"model": "chat", "messages": [{"role": "user", "content": text}], **more}
        )
        return status, body


def run(make):
    async def inside():
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            return await make(session)

    return asyncio.run(inside())


def words(body):
    """The words of a stream, and the comments and errors in it."""
    events = [line for line in body.decode().splitlines() if line]
    data = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
    found = [json.loads(one) for one in data if one != "[DONE]"]
    text = "".join(one["choices"][0]["delta"]["content"] for one in found if one.get("choices"))
    return (
        text.split(),
        [line for line in events if line.startswith(":")],
        [one["error"] for one in found if "error" in one],
    )


def until_ready(shell, count):
    """Scale the service, and wait until the gateway has its replicas."""
    limit_s = time.monotonic() + 90
    while (service := shell.json("show", "chat")["service"])["ready"] != count or service["desired"] != count:
        if service["desired"] != count:
            shell("scale", "chat", str(count))
        assert time.monotonic() < limit_s
        time.sleep(0.2)
    time.sleep(1.1)  # two of the gateway's looks at the list


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("gateway"))
    shell("up", "--virtual", "1x4", "--port", str(free_port()))
    (shell.work / "chat.yaml").write_text(FILE)
    shell("submit", "chat.yaml")
    yield shell
    shell("down", "--cancel-jobs")


@pytest.fixture(scope="module")
def gateway(phalanx):
    process = Gateway(phalanx, "--per-replica", "8")
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.errors.read_text()


def test_requests_to_a_service_without_replicas_wait_for_the_first(phalanx, gateway):
    until_ready(phalanx, 0)

    async def herd(session):
        return await asyncio.gather(
            *(gateway.chat(session, f"hello {number}", stream=True, user=f"u{number}-") for number in range(60))
        )

    answers = run(herd)
    assert [status for status, _ in answers] == [200] * 60
    for number, (_, body) in enumerate(answers):
        text, _comments, errors = words(body)
        assert not errors
        assert text[1:] == [f"u{number}-{one}" for one in range(1, 20)], "each gets its own answer, whole"
    assert phalanx.json("show", "chat")["service"]["desired"] == 1
    port = phalanx.json("show", "chat")["service"]["endpoints"][0]["port"]

    async def peak(session):
        async with session.get(f"http://127.0.0.1:{port}/seen") as answer:
            return await answer.json()

    seen = run(peak)
    assert seen["peak"] <= 8, "the herd is released at the replica's limit"
    assert not any("authorization" in {name.lower() for name in headers} for headers in seen["seen"])


def test_a_prompt_goes_where_its_beginning_was_read_and_others_spread(phalanx, gateway):
    until_ready(phalanx, 3)

    async def turns(session):
        where = []
        for conversation in range(6):
            text = f"{conversation} " * 700
            for turn in range(4):
                text += f"turn {turn} " * 60
                status, body = await gateway.chat(session, text, max_tokens=2)
                assert status == 200
                where.append((conversation, json.loads(body)["choices"][0]["text"].split()[0]))
        return where

    where = run(turns)
    by_conversation = {one: {pid for conversation, pid in where if conversation == one} for one, _ in where}
    assert all(len(pids) == 1 for pids in by_conversation.values()), by_conversation
    assert len({pid for _, pid in where}) == 3, "and the conversations are divided"


def test_a_replica_that_is_killed_loses_no_request_that_it_had_not_begun(phalanx, gateway):
    until_ready(phalanx, 3)

    async def storm(session):
        _, body = await gateway.chat(session, "who", max_tokens=1)
        pid = int(json.loads(body)["choices"][0]["text"])
        tasks = [
            asyncio.create_task(gateway.chat(session, f"{number}", stream=number % 2 == 0)) for number in range(48)
        ]
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        late = [asyncio.create_task(gateway.chat(session, f"late {number}")) for number in range(48)]
        return await asyncio.gather(*tasks, return_exceptions=True), await asyncio.gather(*late, return_exceptions=True)

    begun, late = run(storm)
    assert [one if isinstance(one, Exception) else one[0] for one in late] == [200] * 48
    for one in begun:
        if not isinstance(one, Exception) and one[1].startswith(b"data"):
            text, _, errors = words(one[1])
            assert one[0] == 200
            assert (len(text) == 20) != bool(errors), "a stream is whole, or says that it is not"


def test_a_client_that_leaves_ends_its_request_at_the_replica(phalanx, gateway):
    until_ready(phalanx, 1)
    port = phalanx.json("show", "chat")["service"]["endpoints"][0]["port"]

    async def leave(session):
        body = {"model": "chat", "messages": [], "stream": True, "max_tokens": 20}
        async with session.get(f"http://127.0.0.1:{port}/seen") as answer:
            before = (await answer.json())["cancelled"]
        for _ in range(3):
            headers = {"Authorization": f"Bearer {gateway.key}"}
            async with session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as answer:
                await answer.content.readany()
        limit_s = time.monotonic() + 30
        while True:
            async with session.get(f"http://127.0.0.1:{port}/seen") as answer:
                if (await answer.json())["cancelled"] - before == 3:
                    return
            assert time.monotonic() < limit_s
            await asyncio.sleep(0.1)

    run(leave)


def test_keys_decide_which_models_there_are(phalanx, gateway):
    phalanx("users", "add", "eve")
    phalanx("projects", "add", "other", "--member", "eve")
    token = phalanx("tokens", "add", "--user", "eve").stdout.split()[0]

    until_ready(phalanx, 1)

    async def look(session):
        assert (await gateway.chat(session, "counted", max_tokens=1))[0] == 200
        mine = await gateway.ask(session, None, path="/v1/models", method="GET")
        wrong = await gateway.ask(session, None, path="/v1/models", method="GET", key="phx_wrong")
        eve = await gateway.ask(session, None, path="/v1/models", method="GET", key=token)
        return mine, wrong, eve

    mine, wrong, eve = run(look)
    assert [one["id"] for one in json.loads(mine[1])["data"]] == ["chat"]
    assert wrong[0] == 401
    assert eve[0] == 200
    metrics = run(lambda session: gateway.ask(session, None, path="/metrics", method="GET"))[1].decode()
    assert 'phalanx_gateway_tokens_total{kind="answer",project="default",service="chat"}' in metrics


def test_limits_of_a_project_and_of_a_key_hold(phalanx, gateway):
    until_ready(phalanx, 1)
    user = phalanx.json("show", "chat")["service"]["user"]
    made = phalanx("projects", "add", "limited", "--member", user, "--requests-per-minute", "6", "--weight", "2").stdout
    assert "services: 6 requests/min; weight 2" in made
    token = phalanx("tokens", "add", "--tokens-per-minute", "2k").stdout.split()[0]
    time.sleep(1.1)  # two of the gateway's looks at the list
    body = {"model": "chat", "messages": [], "max_tokens": 2}

    async def ask(session):
        paid = {"OpenAI-Project": "limited"}
        answers = [await gateway.ask(session, body, key=token, headers=paid) for _ in range(8)]
        foreign = await gateway.ask(session, body, headers={"OpenAI-Project": "no-such"})
        large = [await gateway.ask(session, {**body, "max_tokens": 1500}, key=token) for _ in range(2)]
        together = await asyncio.gather(
            *(gateway.ask(session, {**body, "max_tokens": 1500}, key=token) for _ in range(3))
        )
        return answers, foreign, large, together

    answers, foreign, large, together = run(ask)
    assert [status for status, _, _ in answers] == [200] * 6 + [429] * 2
    headers = answers[0][2]
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("6", "5")
    assert headers["x-ratelimit-limit-tokens"] == "2000"
    refused = json.loads(answers[-1][1])["error"]
    assert (refused["type"], refused["code"]) == ("requests", "rate_limit_exceeded")
    assert 1 <= int(answers[-1][2]["Retry-After"]) <= 10
    assert foreign[0] == 403
    assert [status for status, _, _ in large] == [200, 200], "an estimate that was too high is given back"
    assert sorted(status for status, _, _ in together) == [200, 429, 429], "and reserved until then"


def test_clients_that_leave_under_load_leave_no_request_behind(phalanx, gateway):
    """24 streams for 8 places: those that are answered and those that wait leave together."""
    until_ready(phalanx, 1)
    port = phalanx.json("show", "chat")["service"]["endpoints"][0]["port"]

    async def storm(session):
        tasks = [
            asyncio.create_task(gateway.chat(session, f"{number}", stream=True, chunks=500)) for number in range(24)
        ]
        await until_counted(session, waiting=16, in_flight=24, at_engine=8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_counted(session, waiting=0, in_flight=0, at_engine=0)

    async def until_counted(session, *, waiting, in_flight, at_engine):
        limit_s = time.monotonic() + 30
        expected = [
            f'phalanx_gateway_{name}{{service="chat"}} {count}.0'
            for name, count in (("waiting", waiting), ("in_flight", in_flight))
        ]
        while True:
            metrics = (await gateway.ask(session, None, path="/metrics", method="GET"))[1].decode()
            async with session.get(f"http://127.0.0.1:{port}/seen") as answer:
                now = (await answer.json())["now"]
            if now == at_engine and all(line in metrics for line in expected):
                return
            assert time.monotonic() < limit_s, (now, metrics)
            await asyncio.sleep(0.05)

    run(storm)


def test_a_request_ends_at_the_time_that_it_allows(phalanx, gateway):
    until_ready(phalanx, 1)

    async def ask(session):
        body = {"model": "chat", "messages": [], "chunks": 500}
        short = {"X-Request-Timeout": "0.3"}
        return [
            await gateway.ask(session, body, headers=short),
            await gateway.ask(session, {**body, "stream": True}, headers=short),
            await gateway.ask(session, body, headers={"X-Request-Timeout": "soon"}),
            await gateway.ask(session, body, headers={"X-Request-Priority": "1.5"}),
        ]

    whole, stream, *wrong = run(ask)
    assert (whole[0], json.loads(whole[1])["error"]["code"]) == (504, "timeout")
    assert [error["code"] for error in words(stream[1])[2]] == ["timeout"]
    assert [status for status, _, _ in wrong] == [400, 400]


def test_a_flood_of_one_project_does_not_keep_another_waiting(phalanx, gateway):
    until_ready(phalanx, 1)
    user = phalanx.json("show", "chat")["service"]["user"]
    phalanx("projects", "add", "quiet", "--member", user)
    token = phalanx("tokens", "add").stdout.split()[0]  # the gateway remembers the projects of known ones for a minute

    async def ask(session):
        done = []

        async def one(name, project):
            body = {"model": "chat", "messages": [], "max_tokens": 10}
            status, _, _ = await gateway.ask(session, body, key=token, headers={"OpenAI-Project": project})
            done.append((name, status))

        flood = [asyncio.create_task(one("flood", "default")) for _ in range(80)]
        await asyncio.sleep(0.2)
        await one("quiet", "quiet")
        place = len(done)
        await asyncio.gather(*flood)
        return done, place

    done, place = run(ask)
    assert {status for _, status in done} == {200}
    assert place <= 50, "not behind the 72 that waited before it"


def test_the_bill_of_tokens_adds_up_to_the_time_of_the_replicas(phalanx, gateway):
    until_ready(phalanx, 1)
    phalanx("projects", "add", "billed", "--member", phalanx.json("show", "chat")["service"]["user"])
    token = phalanx("tokens", "add").stdout.split()[0]  # the gateway remembers the projects of known ones for a minute
    body = {"model": "chat", "messages": [{"role": "user", "content": "bill"}], "max_tokens": 3}
    paid = {"OpenAI-Project": "billed"}
    assert run(lambda session: gateway.ask(session, body, key=token, headers=paid))[0] == 200
    limit_s = time.monotonic() + 60
    found = phalanx.json("report", "tokens")
    while all(one["project"] != "billed" for one in found["rows"]):
        assert time.monotonic() < limit_s
        time.sleep(1)
        found = phalanx.json("report", "tokens")
    assert [one["requests"] for one in found["rows"] if one["project"] == "billed"] == [1]
    assert found["total"]["answer_tokens"] > 0
    assert sum(one["gpu_us"] for one in found["rows"]) == found["total"]["gpu_us"] > 0
    cost = {one["key"]: one["gpu_hours"] for one in phalanx.json("report", "cost")["rows"]}
    assert cost["billed"] > 0, "in the same bill"


HOSTILE = {
    "no-body": b"",
    "no-json": b"{",
    "a-list": b"[]",
    "no-model": b"{}",
    "model-is-a-number": b'{"model": 1}',
    "foreign-model": b'{"model": "../../etc/passwd"}',
    "nested": b'{"model": "chat", "messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "open-nested": b"[" * 1_000_000,
    "huge-number": b'{"model": "chat", "max_tokens": ' + b"9" * 5000 + b"}",
    "negative": b'{"model": "chat", "max_tokens": "x"}',
    "not-utf-8": b'{"model": "\xff\xfe"}',
    "nul": b'{"model": "\\u0000"}',
    "surrogate": b'{"model": "\\ud800"}',
    "stream-is-text": b'{"model": "chat", "stream": "yes"}',
    "too-large": b'{"model": "chat", "prompt": "' + b"a" * (17 << 20) + b'"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_get_a_4xx(gateway, name):
    status, body, _ = run(lambda session: gateway.ask(session, HOSTILE[name]))
    assert 400 <= status < 500, body[:300]
    assert json.loads(body)["error"]["message"]


def rss_mib(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def send_raw(port, payload):
    """The status of the answer to these bytes; 0 if the connection was cut off without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError, TimeoutError):  # some wait for bytes that never come
        async with asyncio.timeout(20):
            writer.write(payload)
            await writer.drain()
            answer = await reader.read(64 << 10)
    writer.transport.abort()
    return int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0


def test_hostile_requests_cost_no_memory_and_get_no_5xx(phalanx, gateway):
    until_ready(phalanx, 1)
    port = int(gateway.url.rsplit(":", 1)[1])
    hostile = gateway_hostile.requests(gateway.key)
    assert len(hostile) >= 60

    async def send_all():
        return dict(zip(hostile, await asyncio.gather(*(send_raw(port, one) for one in hostile.values())), strict=True))

    memory: list[float] = []
    found: dict[str, int] = {}
    for _ in range(4):
        answers = asyncio.run(send_all())
        memory.append(rss_mib(gateway.process))
        assert {name: status for name, status in answers.items() if status >= 500} == {}
        found |= answers
    alone = asyncio.run(send_raw(port, hostile["body-duplicate-model"]))
    assert alone == 200, "the last of two keys holds, as at the engines"
    assert {found[name] for name in ("no-key", "wrong-key", "long-key", "basic-key")} == {401}
    assert found["gzip-bomb"] == 413
    assert found["foreign-project"] == 403
    assert min(memory[2:]) - min(memory[:2]) < 16, f"it grows with each round: {memory}"
    assert run(lambda session: gateway.chat(session, "fine", max_tokens=1))[0] == 200


def test_clients_that_do_not_read_cost_no_memory(phalanx, gateway):
    until_ready(phalanx, 1)
    port = int(gateway.url.rsplit(":", 1)[1])
    body = b'{"model": "chat", "messages": [], "stream": true, "chunks": 200000, "pause": 0}'
    payload = gateway_hostile.http(gateway.key, body=body)

    async def hold():
        before = rss_mib(gateway.process)
        held = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(8)]
        for _, writer in held:
            writer.write(payload)
        await asyncio.sleep(3.0)  # 8 streams of 9 MB would have come
        grown = rss_mib(gateway.process) - before
        for _, writer in held:
            writer.transport.abort()
        return grown

    assert asyncio.run(hold()) < 32


def test_a_compressed_body_reaches_the_engine_as_text(phalanx, gateway):
    until_ready(phalanx, 1)
    body = gzip.compress(json.dumps({"model": "chat", "messages": [], "max_tokens": 1}).encode())
    status, text, _ = run(lambda session: gateway.ask(session, body, headers={"Content-Encoding": "gzip"}))
    assert (status, len(json.loads(text)["choices"])) == (200, 1)


def test_it_serves_on_while_the_head_is_away_and_starts_from_its_last_list(phalanx, gateway):
    until_ready(phalanx, 1)
    assert run(lambda session: gateway.chat(session, "the key is known", max_tokens=1))[0] == 200
    head = json.loads((phalanx.home / "head.json").read_text())["pid"]
    os.kill(head, signal.SIGSTOP)
    second = None
    try:
        status, _ = run(lambda session: gateway.chat(session, "still there?", max_tokens=1))
        assert status == 200
        status, _, _ = run(lambda session: gateway.ask(session, {"model": "chat"}, key="phx_never_seen"))
        assert status == 503
        second = Gateway(phalanx)
        found = run(lambda session: second.ask(session, None, path="/health", method="GET"))
        assert json.loads(found[1]) == {"services": 1, "head_away_s": None}
    finally:
        os.kill(head, signal.SIGCONT)
        if second is not None:
            second.stop()


def test_keys_are_in_no_file_of_the_gateway(phalanx, gateway):
    for path in (gateway.errors, phalanx.home / "gateway-services.json"):
        assert gateway.key not in path.read_text()
    command = Path(f"/proc/{gateway.process.pid}/cmdline").read_text()
    assert gateway.key not in command


def test_off_loopback_it_wants_tls(phalanx):
    done = phalanx("gateway", "--address", "0.0.0.0", code=64)
    assert "add --tls-cert and --tls-key" in done.stderr
    with contextlib.suppress(FileNotFoundError):
        done = phalanx("gateway", "--address", "0.0.0.0", "--tls-cert", "a.pem", code=64)
        assert "belong together" in done.stderr


SCALED = FILE.replace("name: chat", "name: tide").replace("--pause 0.01", "--pause 0.05") + (
    "scale: {in_flight: 4, queue: 2s}\n"
)


def test_replicas_follow_load_from_zero(phalanx, gateway):
    (phalanx.work / "tide.yaml").write_text(SCALED)
    phalanx("submit", "tide.yaml")
    time.sleep(1.1)  # two of the gateway's looks at the list
    body = {"model": "tide", "messages": [], "stream": True}

    async def load(session):
        first = await gateway.ask(session, body)
        end_s = time.monotonic() + 60
        more = []
        while phalanx.json("show", "tide")["service"]["ready"] < 2:
            assert time.monotonic() < end_s
            more += await asyncio.gather(*(gateway.ask(session, body) for _ in range(8)))
        return [first, *more]

    answers = run(load)
    assert {status for status, _, _ in answers} == {200}
    assert all(len(words(text)[0]) == 20 for _, text, _ in answers)
    why = phalanx("why", "tide").stdout
    assert "2 replicas since" in why
    assert "8 requests, 4 for each replica" in why
    phalanx("cancel", "tide")
