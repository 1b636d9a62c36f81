"""Prompts that one replica reads and another one answers: engines of the tests as processes, a gateway as a process, and a head that lists them."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell
from tests.e2e.test_gateway import Gateway
from tests.gateway_rig import KEY, READER, SERVICE, gateway_rig
from tests.protocol_engine import chat_prompt, expected_text

NIXL = ("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}))
MESSAGES = [{"role": "user", "content": "Tell me of rivers. " * 40}]
ASKED = {"model": SERVICE, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
WANTED = expected_text(chat_prompt(MESSAGES), 40)


def sglang(mode):
    return ("--disaggregation-mode", mode, "--disaggregation-bootstrap-port", str(free_port()))


async def ask(rig, path="/v1/chat/completions", **more):
    """Status and text of an answer, streamed or whole."""
    body = {**ASKED, **more}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with rig.session.post(rig.url + path, json=body, headers=headers) as answer:
        raw = await answer.read()
        if answer.status != 200:
            return answer.status, raw.decode()
        if not body.get("stream"):
            return 200, json.loads(raw)["choices"][0]["message"]["content"]
        lines = [
            line[6:] for line in raw.decode().split("\n\n") if line.startswith("data: ") and line != "data: [DONE]"
        ]
        found = [json.loads(line) for line in lines]
        errors = [one["error"]["message"] for one in found if "error" in one]
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in found if one.get("choices"))
        return 200, text + "".join(f"[{one}]" for one in errors)


async def seen(rig, engine):
    async with rig.session.get(engine.url + "/seen") as answer:
        found = await answer.json()
    return found["reads"], found["fetched"]


async def prefilled(rig):
    lines = [line for line in (await rig.metrics()).splitlines() if line.startswith("phalanx_gateway_prefills_total{")]
    return {line.split('how="')[1].split('"')[0]: int(float(line.rpartition(" ")[2])) for line in lines}


def test_vllm_reads_a_prompt_at_one_replica_and_answers_at_another():
    async def run():
        async with gateway_rig() as rig:
            rig.protocol = "vllm"
            answering, reading = await rig.engine(*NIXL), await rig.engine(*NIXL, reads=True)
            await rig.gateway()
            await rig.until_listed(1, READER)
            assert await ask(rig) == (200, WANTED)
            assert await ask(rig, stream=True, max_completion_tokens=40, min_tokens=3) == (200, WANTED)
            assert (await seen(rig, reading), await seen(rig, answering)) == ((2, 0), (0, 2))
            # Several answers, and probabilities of the prompt, need the whole prompt where the answer is made.
            assert (await ask(rig, n=2))[0] == 200
            assert (await ask(rig, prompt_logprobs=1))[0] == 200
            assert (await seen(rig, reading), await seen(rig, answering)) == ((2, 0), (0, 2))
            # A client may not make engines connect anywhere.
            assert (await ask(rig, kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"}))[0] == 400
            assert (await ask(rig, temperature=-1))[0] == 400, "the error of the engine that answers"
            # Its name is no model: nobody asks it for answers.
            headers = {"Authorization": f"Bearer {KEY}"}
            async with rig.session.get(rig.url + "/v1/models", headers=headers) as answer:
                assert [one["id"] for one in (await answer.json())["data"]] == [SERVICE]
            assert (await ask(rig, model=READER))[0] == 404
            assert await prefilled(rig) == {"read": 2, "refused": 1}

    asyncio.run(run())


def test_vllm_answers_alone_whatever_becomes_of_the_other_replica():
    async def run():
        async with gateway_rig() as rig:
            rig.protocol = "vllm"
            await rig.engine(*NIXL)
            await rig.gateway()

            async def reader(*options):
                """One engine that reads, in the place of the one before."""
                for number in list(rig.readers):
                    rig.engines.pop(number, None)
                await rig.until_listed(0, READER)
                one = await rig.engine(*options, reads=True)
                await rig.until_listed(1, READER)
                return one

            await rig.until_listed(1)
            assert await ask(rig) == (200, WANTED)
            assert await prefilled(rig) == {"none_free": 1}
            for stream in (False, True):  # it fails before it has read
                await rig.fault(await reader(*NIXL), kind="status", status=500, count=1)
                assert await ask(rig, stream=stream) == (200, WANTED)
            assert await prefilled(rig) == {"none_free": 1, "failed": 2}
            losing = await reader(*NIXL)
            for more in ({}, {"stream": True}):  # its blocks are gone when they are fetched
                await rig.fault(losing, kind="lose")
                assert await ask(rig, **more) == (200, WANTED)
            await rig.fault(losing, kind="lose")
            status, text = await ask(
                rig, stream=True, temperature=1.0, ignore_eos=True
            )  # no stream that goes on elsewhere
            assert (status, "[" in text) == (200, False), text
            assert len(text) > 50
            assert (await seen(rig, losing))[0] == 3
            dying = await reader(*NIXL)
            await rig.stop(dying, signal.SIGKILL)
            assert await ask(rig, stream=True) == (200, WANTED)
            assert await prefilled(rig) == {"none_free": 1, "failed": 3, "read": 3}
            assert rig.patched == [], "one is wanted already"
            await reader()  # without a connector, the answer has no parameters
            assert await ask(rig, stream=True) == (200, WANTED)
            assert (await prefilled(rig))["no_transfer"] == 1

    asyncio.run(run())


def test_sglang_reads_and_answers_at_once_and_goes_to_another_pair():
    async def run():
        async with gateway_rig() as rig:
            rig.protocol = "sglang"
            answering = await rig.engine(*sglang("decode"))
            await rig.gateway()
            await rig.until_listed(1)
            waiting = asyncio.create_task(ask(rig, stream=True))
            reading = await rig.engine(*sglang("prefill"), reads=True)  # it waits for one that reads
            assert await waiting == (200, WANTED)
            assert await ask(rig) == (200, WANTED)
            assert (await seen(rig, reading), await seen(rig, answering)) == ((2, 0), (0, 2))
            assert (await ask(rig, bootstrap_room=3))[0] == 400
            assert (await ask(rig, temperature=-1))[0] == 400
            waited = await rig.metric("phalanx_gateway_waits_total")
            await rig.fault(reading, kind="status", status=500, count=1)  # of one request: others go there as before
            assert await ask(rig) == (200, WANTED)
            assert await rig.metric("phalanx_gateway_waits_total") == waited
            for stream in (False, True):
                failing = await rig.engine(*sglang("prefill"), reads=True)
                await rig.until_listed(2, READER)
                for engine in (reading, failing):
                    await rig.fault(engine, kind="status", status=500, count=1)
                await asyncio.gather(*[_answered(rig, stream=stream) for _ in range(2)])
                rig.forget(failing)
                await rig.until_listed(1, READER)
            spare = await rig.engine(*sglang("prefill"), reads=True)
            await rig.until_listed(2, READER)
            await rig.stop(reading, signal.SIGKILL)
            await asyncio.gather(*[_answered(rig, stream=bool(number % 2)) for number in range(8)])
            assert (await seen(rig, spare))[0] >= 8

    asyncio.run(run())


async def _answered(rig, *, stream):
    assert await ask(rig, stream=stream) == (200, WANTED)


def test_a_client_that_leaves_ends_both():
    async def run():
        async with gateway_rig() as rig:
            rig.protocol = "sglang"
            answering = await rig.engine(*sglang("decode"), "--pause", "0.05")
            reading = await rig.engine(*sglang("prefill"), "--prefill", "0.2", reads=True)
            await rig.gateway()
            await rig.until_listed(1, READER)
            asked = asyncio.create_task(ask(rig, stream=True))

            async def counts(name):
                found = []
                for engine in (answering, reading):
                    async with rig.session.get(engine.url + "/seen") as answer:
                        found.append((await answer.json())[name])
                return found

            async with asyncio.timeout(30):
                while await counts("now") != [1, 1]:  # noqa: ASYNC110 - it looks at another process
                    await asyncio.sleep(0.02)
                asked.cancel()
                while await counts("cancelled") != [1, 1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
                await asked

    asyncio.run(run())


ROLES = f"""
type: service
name: chat
ready: /health
workdir: {Path(__file__).parents[2]}
env:
  PYTHONPATH: {Path(__file__).parents[2]}
roles:
  prefill:
    replicas: 1..2
    gpus: 1
    run: |
      exec env VLLM_NIXL_SIDE_CHANNEL_PORT=$MASTER_PORT {sys.executable} -m tests.protocol_engine --port $PORT --kv-transfer-config '{NIXL[1]}'
  decode:
    gpus: 2
    run: |
      exec env VLLM_NIXL_SIDE_CHANNEL_PORT=$MASTER_PORT {sys.executable} -m tests.protocol_engine --port $PORT --served-model-name chat --kv-transfer-config '{NIXL[1]}'
"""


def test_a_file_with_roles_starts_two_services_that_scale_and_pay_as_one(tmp_path):
    shell = Shell(tmp_path)
    shell("up", "--virtual", "1x4", "--port", str(free_port()))
    gateway = None
    try:
        (shell.work / "chat.yaml").write_text(ROLES)
        assert "phalanx serve up chat.yaml starts both" in shell("submit", "chat.yaml", code=78).stderr
        up = shell("serve", "up", "chat.yaml", "--timeout", "2m")
        assert "service chat-prefill submitted" in up.stdout
        assert "service chat submitted" in up.stdout
        assert "unchanged" in shell("serve", "up", "chat.yaml").stdout
        assert "prompts   read by chat-prefill" in shell("serve", "ps", "chat").stdout
        assert "prompts   reads those of chat (vllm)" in shell("serve", "ps", "chat-prefill").stdout
        gateway = Gateway(shell)

        async def talk():
            assert gateway is not None
            async with aiohttp.ClientSession() as session:
                for number in range(4):
                    text = (await gateway.ask(session, {**ASKED, "stream": bool(number % 2)}))[1]
                    assert b"error" not in text, text

        async def until(line):
            assert gateway is not None
            headers = {"Authorization": f"Bearer {gateway.key}"}
            async with asyncio.timeout(60), aiohttp.ClientSession() as session:
                while True:
                    async with session.get(gateway.url + "/metrics", headers=headers) as answer:
                        if line in await answer.text():
                            return
                    await asyncio.sleep(0.1)

        asyncio.run(talk())
        asyncio.run(until('phalanx_gateway_prefills_total{how="read",service="chat-prefill"} 4.0'))
        shell("scale", "chat-prefill", "2")
        asyncio.run(until('phalanx_gateway_replicas{service="chat-prefill"} 2.0'))
        assert gateway.stop() == 0
        gateway = None
        assert shell("serve", "down", "chat").stdout.splitlines() == [
            "service chat is stopped",
            "service chat-prefill is stopped",
        ]
        rows = shell.json("report", "tokens")["rows"]
        assert [(row["service"], row["requests"]) for row in rows] == [("chat", 4)]
        spans = shell.json("report", "usage", "--by", "job")["rows"]
        used = {row["key"]: row["gpu_us"] for row in spans if row["key"]}
        assert sorted(used) == ["1", "2", "3"]
        assert rows[0]["gpu_us"] + rows[0]["idle_gpu_us"] == sum(used.values()), "replicas of both, all of their time"
    finally:
        if gateway is not None:
            gateway.stop()
        shell("down", "--cancel-jobs")
