"""Sleep and wake hooks on the node: which commands count, what is asked of the program, and when its answer counts as success."""

import http.server
import queue
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from phalanx.core.state.commands import RunSleepHook
from phalanx.core.state.reports import SleepHookEnded
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.services.service_terms import ServiceTerms
from phalanx.node.logic import member as members
from phalanx.node.logic.actions import CallSleepHook, SendEvent
from phalanx.node.logic.events import SleepHookAnswered
from phalanx.node.logic.local_member import MemberPhase, StepClock
from phalanx.node.probes import sleep_hooks
from tests.scenario.supervisor_world import NODE, prepare, start

TERMS = ServiceTerms(
    replicas_min=1, replicas_max=1, ready="/health", sleep="/sleep?level=1", wake="/wake_up", ready_within_s=60.0
)


# ---- the supervisor's logic -----------------------------------------------------------------------------------------


def running(**fields):
    order = prepare()
    member, _ = members.begin(order, order.allocation.grants[0], StepClock(ns=1, unix_s=1.0))
    return replace(member, phase=MemberPhase.RUNNING, **fields)


def hook(member, turn, *, sleep):
    return RunSleepHook(
        node_id=NODE,
        job_id=member.key.job_id,
        epoch=member.key.epoch,
        generation=member.key.generation,
        turn=turn,
        sleep=sleep,
    )


def answered(member, turn, *, sleep, why=""):
    return SleepHookAnswered(key=member.key, turn=turn, sleep=sleep, why=why)


def test_each_turn_calls_its_hook_once_and_a_repeated_command_repeats_the_answer():
    member, actions = members.run_sleep_hook(running(), hook(running(), 1, sleep=True))
    assert actions == [CallSleepHook(key=member.key, turn=1, sleep=True)]
    assert members.run_sleep_hook(member, hook(member, 1, sleep=True)) == (member, []), "it runs"
    member, told = members.on_sleep_hook_answered(member, answered(member, 1, sleep=True))
    (sent,) = told
    assert isinstance(sent, SendEvent)
    assert isinstance(sent.event, SleepHookEnded)
    assert (sent.event.turn, sent.event.sleep, sent.event.why) == (1, True, "")
    assert members.run_sleep_hook(member, hook(member, 1, sleep=True)) == (member, told)


def test_late_command_of_an_earlier_turn_wakes_nothing():
    """It may have waited in a cut network while another job was granted the devices."""
    member = running(hook_turn=3)
    assert members.run_sleep_hook(member, hook(member, 2, sleep=False)) == (member, [])
    assert members.on_sleep_hook_answered(member, answered(member, 2, sleep=True)) == (member, [])


@pytest.mark.parametrize(
    "fields", [{"phase": MemberPhase.STOPPING}, {"phase": MemberPhase.READY}, {"superseded": True}]
)
def test_hook_is_for_members_that_run(fields):
    member = replace(running(hook_turn=1), **fields)
    assert members.run_sleep_hook(member, hook(member, 2, sleep=True)) == (member, [])
    assert members.on_sleep_hook_answered(member, answered(member, 1, sleep=True)) == (member, [])


# ---- the requests ---------------------------------------------------------------------------------------------------


class Program(http.server.BaseHTTPRequestHandler):
    """Answers hooks; after its wake hook it needs two more probes to be ready."""

    log: list[tuple[str, str, bytes]]
    statuses: dict[str, int]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.log.append(("POST", self.path, body))
        self.answer(self.statuses.get(self.path, 404))

    def do_GET(self):
        self.log.append(("GET", self.path, b""))
        probes = sum(verb == "GET" for verb, _, _ in self.log)
        self.answer(200 if probes > 2 else 503)

    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"secret")

    def log_message(self, *_):
        pass


@pytest.fixture
def program():
    kind = type("One", (Program,), {"log": [], "statuses": {"/sleep?level=1": 200, "/wake_up": 204}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def call(program, *, sleep, terms=TERMS):
    return sleep_hooks.run_hook("127.0.0.1", program.server_address[1], terms, sleep=sleep)


def test_sleep_hook_is_a_post_of_an_empty_object(program):
    assert call(program, sleep=True) == ""
    assert program.RequestHandlerClass.log == [("POST", "/sleep?level=1", b"{}")]


def test_wake_hook_has_succeeded_once_the_program_is_ready(program):
    assert call(program, sleep=False) == ""
    assert [verb for verb, _, _ in program.RequestHandlerClass.log] == ["POST", "GET", "GET", "GET"]


def test_reasons_name_the_request_and_quote_nothing(program):
    program.RequestHandlerClass.statuses.update({"/sleep?level=1": 500})
    assert call(program, sleep=True) == "POST /sleep?level=1 answered 500"
    program.RequestHandlerClass.statuses.clear()
    assert call(program, sleep=False) == "POST /wake_up answered 404"
    program.server_close()
    program.shutdown()
    assert call(program, sleep=True).startswith("POST /sleep?level=1: ")


class Member:
    """What a hook needs of a member."""

    def __init__(self, port):
        order = prepare()
        self.prepare = replace(order, addresses=("127.0.0.1",), spec=replace(order.spec, service=TERMS))
        self.start = replace(start(), service_port=port)
        self.asleep = False


def test_program_that_keeps_the_memory_of_its_devices_is_not_asleep(program):
    member: Any = Member(program.server_address[1])
    found: queue.Queue[SleepHookAnswered] = queue.Queue()
    key = running().key
    for in_use in ("GPU 0: 60000 of 81559 MiB are in use by other processes", ""):
        call = CallSleepHook(key=key, turn=1, sleep=True)
        sleep_hooks.call_sleep_hook(member, call, partial(str, in_use), found.put)
        assert found.get(timeout=60) == SleepHookAnswered(key=key, turn=1, sleep=True, why=in_use)
        assert member.asleep == (not in_use)


def test_a_look_at_the_devices_that_fails_is_an_answer_too(program):
    def fails():
        raise RuntimeError("the driver is gone")

    member: Any = Member(program.server_address[1])
    found: queue.Queue[SleepHookAnswered] = queue.Queue()
    sleep_hooks.call_sleep_hook(member, CallSleepHook(key=running().key, turn=1, sleep=True), fails, found.put)
    assert found.get(timeout=60).why == "RuntimeError: the driver is gone"
    assert not member.asleep


# ---- the keys -------------------------------------------------------------------------------------------------------

FILE = {"type": "service", "name": "web", "run": "serve", "gpus": 1}


def test_keys():
    found = spec_from_mapping({**FILE, "sleep": "/sleep?level=1", "wake": "/wake_up"}, workdir="/w").service
    assert found is not None
    assert (found.sleep, found.wake) == ("/sleep?level=1", "/wake_up")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sleep": "/sleep"}, "sleep: a service that sleeps also needs wake"),
        ({"wake": "/wake"}, "wake: a service that sleeps also needs sleep"),
        ({"sleep": "sleep", "wake": "/wake"}, "sleep: 'sleep' is not a path"),
        ({"sleep": "/sleep", "wake": "/w\r\nHost: x"}, "is not a path"),
        ({"sleep": "/sleep", "wake": "/wake", "gpus": 0}, "sleep: only replicas on whole GPUs can sleep"),
        ({"sleep": "/sleep", "wake": "/wake", "gpus": "1/2"}, "sleep: only replicas on whole GPUs can sleep"),
        ({"type": "job", "sleep": "/sleep", "wake": "/wake"}, "only services have it"),
    ],
)
def test_wrong_keys_are_named(keys, said):
    with pytest.raises(InvalidKey) as refused:
        spec_from_mapping({**FILE, **keys}, workdir="/w")
    assert said in refused.value.message
