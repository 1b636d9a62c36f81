"""A service behind two gateways gets a revision that fails a twentieth of its requests: it goes back by itself."""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell
from tests.e2e.test_gateway import Gateway

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RATE = 40  # requests a second
FILE = """
type: service
name: chat
run: exec {python} -m tests.protocol_engine --port $PORT {options}
env: {{PYTHONPATH: "{root}"}}
gpus: 1
replicas: 2
ready: /health
update: {{canary: 5%..50%{more}}}
"""


class Traffic:
    """Chats at a steady rate through the gateways in turn, each its own session of three requests."""

    def __init__(self, gateways):
        self.gateways = gateways
        self.answers: list[tuple[float, int, str]] = []  # when, status, session
        self.ended = False

    async def run(self):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            began_s, tasks = time.monotonic(), set()
            for number in itertools.count():
                if self.ended:
                    break
                await asyncio.sleep(max(0.0, began_s + number / RATE - time.monotonic()))
                tasks.add(asyncio.create_task(self.ask(session, number)))
                tasks = {one for one in tasks if not one.done()}
            await asyncio.gather(*tasks)

    async def ask(self, session, number):
        gateway, name = self.gateways[number % len(self.gateways)], f"s{number // 3}"
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": name}],
            "user": name,
            "stream": True,
            "max_tokens": 4,
        }
        status, _, _ = await gateway.ask(session, body)
        self.answers.append((time.monotonic(), status, name))


def write(shell, options="", more=""):
    text = FILE.format(python=sys.executable, root=ROOT, options=options, more=more)
    (shell.work / "chat.yaml").write_text(text)


def under_traffic(shell, gateways, *words):
    """Run a command under traffic; its exit code, output, when it began and the traffic."""
    traffic = Traffic(gateways)

    async def inside():
        asking = asyncio.create_task(traffic.run())
        while len(traffic.answers) < 2 * RATE:  # noqa: ASYNC110 - it counts answers
            await asyncio.sleep(0.05)
        began_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *shell.argv(*words), cwd=shell.work, env=shell.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await process.communicate()
        traffic.ended = True
        await asking
        return process.returncode, output.decode(), began_s

    return (*asyncio.run(inside()), traffic)


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("canary"))
    shell("up", "--virtual", "1x4", "--port", str(free_port()))
    write(shell)
    shell("serve", "up", "chat.yaml")
    yield shell
    shell("down", "--cancel-jobs")


@pytest.fixture(scope="module")
def gateways(phalanx):
    found = [Gateway(phalanx), Gateway(phalanx)]
    yield found
    for one in found:
        assert one.stop() == 0
        assert "Traceback" not in one.errors.read_text()


def test_a_revision_with_5_percent_errors_goes_back_by_itself(phalanx, gateways, record_property):
    write(phalanx, "--fail-share 0.05")
    code, output, began_s, traffic = under_traffic(phalanx, gateways, "serve", "up", "chat.yaml")
    after = [(at_s - began_s, status) for at_s, status, _ in traffic.answers if at_s >= began_s]
    hurt, back_s = sum(status != 200 for _, status in after), max(at_s for at_s, _ in after)
    figures = f"back {back_s:.0f} s after the command, {hurt} of {len(after)} requests hurt ({hurt / len(after):.2%})"
    record_property("figures", figures)
    print(figures)
    assert code == 1, output
    assert "revision 2 was sent back: " in output
    assert "errors of revision 2 against 0.0 % of revision 1 after" in output
    assert "service chat is back at revision 1" in output
    assert hurt <= 0.01 * max(len(after), 60 * RATE)
    detail = phalanx.json("serve", "ps", "chat")
    assert (detail["service"]["revision"], detail["service"]["served_revision"]) == (1, 1)
    assert detail["service"]["failure"].startswith("revision 2 was sent back: ")


def test_a_good_revision_is_rolled_out_and_no_session_goes_back(phalanx, gateways):
    write(phalanx, "--enable-prompt-tokens-details", ", step: 5s")
    code, output, _, traffic = under_traffic(phalanx, gateways, "serve", "up", "chat.yaml")
    assert code == 0, output
    assert {status for _, status, _ in traffic.answers} == {200}
    detail = phalanx.json("serve", "ps", "chat")
    assert detail["service"]["served_revision"] == detail["service"]["revision"] == 3
    assert json.dumps(detail).count('"ready": true') >= 2
