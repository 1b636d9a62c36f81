"""Events on their way to the head: what cannot be written down holds up nothing behind it, and nobody loses an answer to a file's name."""

# mypy: disable-error-code="arg-type,method-assign,assignment"

import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from phalanx.core.state.reports import CheckpointSaved, MemberRefused
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.head_link.channels import EventSender
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess
from phalanx.node.logic import events as hap
from phalanx.node.logic.utf8 import replace_invalid_utf8
from phalanx.node.probes import devices
from phalanx.wire import supervisor as wire
from tests.scenario.supervisor_world import World, key_of, prepare
from tests.unit.test_supervisor_shell import present, started

PATIENCE_S = 100.0
NAMELESS = "/data/\udcff.bin"  # as Python has a file's name that is no UTF-8


def test_an_event_that_cannot_be_written_down_is_given_up_and_those_behind_it_arrive(caplog):
    """Found by reading: it ended the supervisor, and with it every job of the node."""
    sent, ended = [], threading.Event()
    access = HeadAccess(address=HeadAddress("http://127.0.0.1:1", None), token="t", ca_file=None)
    events = EventSender(access, SimpleNamespace(registrations=1), supervisor_id="s", ended=ended)
    resume = PublishedCheckpoint(epoch=1, step=1, path=NAMELESS, digest="d")
    bad = CheckpointSaved(job_id="1", generation=0, node_id="n0", resume=resume, stall_s=0.0, write_s=0.0)

    def call(_method, _path, body, **_):
        sent.extend(wire.decode(body, wire.EventsRequest).events)
        return wire.encode(wire.EventsReply(acked=sent[-1].seq))

    events._connection.call = call
    events.put([started("1"), bad, started("2")])
    thread = threading.Thread(target=events.run, daemon=True)
    thread.start()
    assert events.wait_flushed(PATIENCE_S)
    events.put([replace(bad, resume=replace(resume, digest="\ud800"))])
    assert events.wait_flushed(PATIENCE_S)
    ended.set()
    thread.join(PATIENCE_S)
    assert [framed.seq for framed in sent] == [1, 3]
    assert "event 2 (CheckpointSaved) cannot be encoded and is lost" in caplog.text


def test_a_refusal_that_names_a_file_arrives_whatever_its_name_is():
    """Found by reading: its event and its line in the job's log each ended the supervisor."""
    world = World(auto=False).tell(prepare())
    world.hear(hap.MemberStartFailed(key=key_of(), why=f"preparing failed on this node: {NAMELESS}", charge=False))
    world.auto = True
    world.hear()
    (refused,) = world.said(MemberRefused)
    assert refused.why == "preparing failed on this node: /data/?.bin"
    assert all(b"/data/?.bin" in wire.encode(action) for action in world.actions if hasattr(action, "text"))


def test_a_line_of_ours_in_a_jobs_log_may_name_any_file(tmp_path):
    from phalanx.node.prepare.node_services import NodeServices

    written = []
    shop = NodeServices.__new__(NodeServices)
    spool, shipper = (
        SimpleNamespace(add=lambda *_, **__: None, write=lambda _, data: written.append(data)),
        SimpleNamespace(add=lambda _: None),
    )
    for name, value in (("spool", spool), ("shipper", shipper)):
        object.__setattr__(shop, name, value)
    shop.note(present(tmp_path), f"{NAMELESS} is not kept")
    assert written == [b"phalanx: /data/?.bin is not kept\n"]


def test_a_node_whose_name_is_no_text_says_hello_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu\udcff7")
    assert devices.node_facts(str(tmp_path)).hostname == "gpu?7"


@pytest.mark.parametrize(("text", "shown"), [("plain", "plain"), ("grün", "grün"), ("a\udc80\ud800b", "a??b")])
def test_legible_text_is_left_as_it_is(text, shown):
    assert replace_invalid_utf8(text) == shown
