"""The keepers of servers that joined: what they go on with after a server had no process, file or space to give for a while."""

# What is kept is played here.
# mypy: disable-error-code="arg-type, var-annotated, attr-defined"

from types import SimpleNamespace

import pytest

from phalanx.app import server_keeper
from phalanx.engines.joined import keeper
from phalanx.engines.ray import joined_node

FULL = OSError(28, "No space left on device")
NO_THREAD = RuntimeError("can't start new thread")
JOINED = SimpleNamespace(engine="joined", node_id="n0")


class Ended:
    """Told to end at the wait of that number; `waited_s` is how long each was to be."""

    keep_node = False

    def __init__(self, after):
        self.after, self.waited_s = after, []

    def wait(self, seconds):
        self.waited_s.append(seconds)
        return len(self.waited_s) >= self.after


class RayNode:
    """Fails to start so often, then lives."""

    def __init__(self, *errors):
        self.errors, self.told = list(errors), []

    def is_running(self):
        return "started" in self.told

    def last_line(self):
        return ""

    def start(self):
        if self.errors:
            raise self.errors.pop(0)
        self.told.append("started")

    def stop(self):
        self.told.append("stopped")


@pytest.fixture
def swept(monkeypatch):
    folders = []
    monkeypatch.setattr(joined_node, "sweep_supervisors", folders.append)
    return folders


def test_a_ray_node_that_could_not_be_started_is_tried_again_with_growing_pauses(monkeypatch, swept):
    """Found by reading: one full disk, and the keeper was gone for good."""
    process, ended = RayNode(FULL, FULL, FULL, FULL), Ended(after=6)
    monkeypatch.setattr(joined_node, "joined_ray_process", lambda folder, joined: process)
    joined_node.keep_ray_node("f", JOINED, ended)
    assert ended.waited_s == [4.0, 8.0, 15.0, 15.0, 2.0, 2.0]
    assert (process.told, swept) == (["started", "stopped"], ["f"])


def test_its_keeper_may_be_told_to_end_while_it_waits(monkeypatch, swept):
    process = RayNode(FULL)
    monkeypatch.setattr(joined_node, "joined_ray_process", lambda folder, joined: process)
    joined_node.keep_ray_node("f", JOINED, Ended(after=1))
    assert (process.told, swept) == (["stopped"], ["f"])


class Engine:
    def __init__(self, told):
        self.told = told

    def open(self):
        if self.told.count("made") == 2:
            raise NO_THREAD
        self.told.append("opened")

    def observe(self):
        return []

    def close(self, *, keep_nodes):
        self.told.append(f"closed, {keep_nodes=}")


def keeps(monkeypatch, ended):
    """What the keeper of a supervisor does where its first two tries fail."""
    told, errors = [], [FULL]

    def make(folder, joined):
        told.append("made")
        if errors:
            raise errors.pop()
        return Engine(told)

    monkeypatch.setattr(keeper, "_supervisor_engine", make)
    monkeypatch.setattr(server_keeper.signal, "signal", lambda *_: None)
    monkeypatch.setattr(server_keeper, "KeeperStop", lambda: ended)
    server_keeper._keep("f", JOINED)
    return told


def test_a_supervisor_that_could_not_be_brought_up_is_tried_again(monkeypatch):
    ended = Ended(after=4)
    assert keeps(monkeypatch, ended) == ["made", "made", "made", "opened", "closed, keep_nodes=False"]
    assert ended.waited_s == [1.0, 2.0, 1.0, 1.0]


def test_its_keeper_may_be_told_to_end_before_it_was(monkeypatch):
    assert keeps(monkeypatch, Ended(after=1)) == ["made"]
