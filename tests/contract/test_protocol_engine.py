"""The engine of the tests keeps vLLM's protocol; its faults do what they say."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.cluster import free_port
from tests.contract.engine_protocol import CHAT, CLIENT, TEXT, EngineProtocol, Running, say, texts, until
from tests.protocol_engine import chat_prompt, expected_text

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running(*options):
    """An engine until the end of the block, and its process."""
    port = free_port()
    words = ["-m", "tests.protocol_engine", "--port", str(port), "--served-model-name", "chat", *options]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT)
    try:
        until(lambda: answers(port))
        yield Running(f"http://127.0.0.1:{port}"), process
    finally:
        process.kill()
        process.wait()


def answers(port):
    with contextlib.suppress(httpx.TransportError):
        return CLIENT.get(f"http://127.0.0.1:{port}/health", timeout=5)
    return None


class TestProtocolEngine(EngineProtocol):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls):
        with running("--enable-prompt-tokens-details", "--pause", "0.01", "--max-model-len", "4096") as (engine, _):
            yield engine

    def test_what_a_greedy_answer_must_be_is_known(self, engine):
        found = engine.whole(CHAT, messages=say("Hi"), temperature=0, max_tokens=200)["choices"][0]
        assert found["message"]["content"] == expected_text(chat_prompt(say("Hi")), 200)
        assert len(found["message"]["content"]) > 100


@pytest.fixture
def odd_engine():
    with running("--pause", "0.001", "--odd") as found:
        yield found


def test_odd_tokens_and_faults(odd_engine):
    """A tokenizer joins tokens that the engine keeps apart: a text that is cut there does not go on from its tokens. Then all faults."""
    engine, process = odd_engine
    parts = texts(engine.events(TEXT, prompt="odd", temperature=0, max_tokens=120, ignore_eos=True))
    cut = next(
        at + 1 for at, one in enumerate(parts) if one == "s" and parts[at - 1][-1:].isalpha() and len(parts[at - 1]) < 7
    )
    so_far = engine.tokens(prompt="".join(parts[:cut]))
    assert len(so_far) < cut
    tokens = engine.tokens(prompt="odd") + so_far
    rest = engine.whole(TEXT, prompt=tokens, temperature=0, max_tokens=120 - cut, ignore_eos=True)
    assert rest["choices"][0]["text"] != "".join(parts[cut:])

    def fault(**asked):
        return CLIENT.post(engine.url + "/fault", json=asked)

    fault(kind="status", status=503, count=2)
    statuses = [engine.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code for _ in range(3)]
    assert statuses == [503, 503, 200]
    fault(kind="hang")
    with pytest.raises(httpx.ReadTimeout):
        CLIENT.post(engine.url + TEXT, json={"model": "chat", "prompt": "a"}, timeout=0.5)
    assert CLIENT.get(engine.url + "/health").status_code == 200
    fault(kind="none")
    engine.whole(TEXT, prompt="a", max_tokens=1)
    fault(kind="slow", factor=100)
    began_s = time.monotonic()
    engine.whole(TEXT, prompt="a", max_tokens=5, ignore_eos=True)
    assert time.monotonic() - began_s >= 0.5
    fault(kind="none")
    with CLIENT.stream(
        "POST",
        engine.url + TEXT,
        json={"model": "chat", "prompt": "a", "max_tokens": 5000, "stream": True, "ignore_eos": True},
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        fault(kind="dead")
        rest = list(lines)
    assert any(one.startswith('data: {"error":') for one in rest)
    assert CLIENT.get(engine.url + "/health").status_code == 503
    fault(kind="none")
    fault(kind="crash", after_tokens=5)
    with pytest.raises(httpx.RemoteProtocolError):
        engine.events(TEXT, prompt="a", max_tokens=50, ignore_eos=True)
    assert process.wait(30) == -9
