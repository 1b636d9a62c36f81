"""Two gateways under faults: the soak of `python -m benchmarks.gateway_soak` in small, and a restart that keeps its prefix hits."""

import asyncio
import random
import time

import pytest

from benchmarks.gateway_soak import run_gateway_soak
from tests.gateway_rig import KEY, SERVICE, gateway_rig

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(600)]

MINUTES = 4.0
REPLICAS = 4
CONVERSATIONS = 24


def test_no_answer_is_wrong_or_mixed_and_the_other_gateway_answers_after_a_reset():
    found = asyncio.run(run_gateway_soak(minutes=MINUTES, rate_per_s=10.0, seed=random.randrange(10**6)))
    print(found.summary())
    assert found.wrong == []
    assert found.unanswered == []
    assert found.counts["asked"] > MINUTES * 60
    assert found.counts["answered by the other after a reset"] > 0
    assert len(found.faults) >= 8
    assert found.continued > 0
    assert found.left_in_flight == 0
    assert found.counts["whole"] >= 0.97 * (found.counts["asked"] - found.counts["left"])


def test_the_soak_finds_answers_of_other_words():
    """An engine that speaks otherwise than it should is found."""
    found = asyncio.run(run_gateway_soak(minutes=0.2, rate_per_s=10.0, planted=True))
    assert found.wrong


async def turn(rig, texts):
    """Ask for the next turn of each conversation."""
    for number, text in enumerate(texts):
        texts[number] = text + f" And then, number {number}? " + random.Random(len(text)).randbytes(300).hex()
        body = {"model": SERVICE, "messages": [{"role": "user", "content": texts[number]}], "max_tokens": 1}
        async with rig.session.post(
            rig.url + "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}
        ) as answer:
            assert answer.status == 200
            await answer.read()


async def hits(rig):
    """Tokens of prompts that were in the caches, and all."""
    found = [0.0, 0.0]
    for one in rig.engines.values():
        async with rig.session.get(one.url + "/metrics") as answer:
            for line in (await answer.text()).splitlines():
                for number, name in enumerate(("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")):
                    if line.startswith(name + "{"):
                        found[number] += float(line.rpartition(" ")[2])
    return found


async def hit_share_of_a_turn(rig, texts):
    before = await hits(rig)
    await turn(rig, texts)
    after = await hits(rig)
    return (after[0] - before[0]) / (after[1] - before[1])


@pytest.mark.parametrize("saved", [True, False], ids=["with-its-files", "without"])
def test_kill_9_of_a_gateway_costs_few_prefix_hits(saved, tmp_path):
    async def inside():
        async with gateway_rig() as rig:
            for _ in range(REPLICAS):
                await rig.engine()
            files = ("--prefixes", str(tmp_path / "prefixes")) if saved else ()
            gateway = await rig.gateway(*files)
            await rig.until_listed(REPLICAS)
            texts = [random.Random(number).randbytes(2000).hex() for number in range(CONVERSATIONS)]
            await turn(rig, texts)
            before = await hit_share_of_a_turn(rig, texts)
            if saved:
                limit_s, began_s = time.monotonic() + 60, time.time()
                while not any(one.stat().st_mtime > began_s for one in (tmp_path / "prefixes").glob("?")):
                    assert time.monotonic() < limit_s
                    await asyncio.sleep(0.1)
            gateway.kill()
            await gateway.wait()
            await rig.gateway(*files)
            await rig.until_listed(REPLICAS)
            random.Random(1).shuffle(texts)
            return before, await hit_share_of_a_turn(rig, texts)

    before, after = asyncio.run(inside())
    print(f"hit share before {before:.3f}, after {after:.3f}")
    assert before > 0.8
    if saved:
        assert after >= before - 0.05
    else:
        assert after < before - 0.2, "the files make the difference"
