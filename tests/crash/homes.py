"""The homes of heads that are killed, the ways to kill one, and what is done until it dies."""

import base64
import os
import pathlib
import shutil
import tempfile
from dataclasses import dataclass

import pytest

from benchmarks.cluster import free_port, wait_until
from phalanx.failpoints import FAILPOINTS, FailureMode
from phalanx.node.files.private_files import write_private
from tests.crash.armed_head import ArmedHead, HeadGone, Refused
from tests.crash.ledger import Ledger
from tests.crash.load import Load

# Each passes every write of a serving head; what the third has not reached, the sixth may, at a later pass.
ROUNDS_MAX = 6
KILLS = (FailureMode.KILL, FailureMode.AFTER, FailureMode.TORN)
# Passed only where something else went wrong before: what, as another arming of the same head.
AFTER_WHAT = {
    "store.migrate.rollback": "store.migrate.commit=error",
    "store.commit.rollback": "store.commit.rows=error:40",
    "store.settle.checkpoint": "store.commit.commit=error:30",
    "postgres.migrate.rollback": "postgres.migrate.commit=error",
    "logs.take_back.cut": "logs.append.sync=error:1",
    "logs.take_back.remove": "logs.append.sync=full:1",
    "kept.take_back.remove": "kept.piece.sync=error:1",
}


@dataclass(slots=True)
class Home:
    """One state folder, its nodes, and all that its heads acknowledged."""

    head: ArmedHead
    ledger: Ledger
    load: Load
    broken: bool = False

    @classmethod
    def make(cls, virtual="2x4", words=(), store="", kind=ArmedHead):
        head = kind(
            home=os.path.join(tempfile.mkdtemp(prefix="phalanx-kill-"), "home"), port=free_port(), virtual=virtual
        )
        head.head_arguments, head.store = words, store
        ledger = Ledger(head)
        home = cls(head=head, ledger=ledger, load=Load(head, ledger))
        if store:  # heads that share a database have to be given the keys of secrets
            home.give_key()
            head.head_arguments = (*words, "--secrets-key", home.key_file)
        return home

    @property
    def key_file(self):
        return os.path.join(os.path.dirname(self.head.home), "secrets.key")

    def give_key(self):
        """Write a new key above those that the heads have; a single head makes its own."""
        if self.head.store:
            known = pathlib.Path(self.key_file).read_text() if os.path.exists(self.key_file) else ""
            write_private(
                os.path.dirname(self.key_file), "secrets.key", f"{base64.b64encode(os.urandom(32)).decode()}\n{known}"
            )

    def recover(self):
        """The next life: all is compared, then wound up."""
        assert self.head.begin(), "a head that was killed starts again"
        wait_until(self.head.sees_nodes, "the nodes are up")
        self.ledger.ask_again()
        self.ledger.verify()
        self.ledger.wind_up()
        self.load.begun = None

    def close(self):
        with_head = self.head.head is not None and self.head.head.poll() is None
        if not with_head:
            self.head.begin()
        self.head.stop()
        assert self.head.orphans() == []
        shutil.rmtree(os.path.dirname(self.head.home), ignore_errors=True)


def ways(wanted, passes=(1,)):
    """(point, failure, pass) of every way in which the head can be killed at the points that `wanted` takes."""
    return [
        pytest.param(name, failure, nth, id=f"{name}-{failure.value}-{nth}")
        for name, failures in FAILPOINTS.items()
        if wanted(name)
        for failure in KILLS
        if failure in failures
        for nth in passes
    ]


def killed_under_load(homes, make, armed, *, name=""):
    """Kill the head that the cases share, armed so, and compare all with the next; a case that fails leaves a fresh home to the next."""
    home = homes[0]
    if home.broken:
        home.close()
        home = homes[0] = make()
        home.recover()
    home.broken = True
    leave_what_runs_on(home, name)
    home.head.kill_head()
    leave_what_it_meets(home, name)
    assert dies_under_load(home, armed), f"no life of a head reached {name}: teach the load to pass it"
    home.recover()
    home.broken = False


def killed_while_young(home, armed, *, name=""):
    """Kill a head where it makes its home, and let the next one serve there."""
    leave_what_it_meets(home, name)
    try:
        assert dies_starting(home, armed) or dies_stopping(home), f"no life of a head reached {name}"
        home.recover()
        home.load.jobs_alone()
        home.ledger.verify()
    finally:
        home.close()


def arming(name, failure, nth):
    """The line that arms a point, after what leads to it."""
    return ",".join(filter(None, (AFTER_WHAT.get(name), f"{name}={failure.value}:{nth}")))


def leave_what_runs_on(home, name):
    """What the head before has begun, where a point is only passed by one that goes on with it."""
    if name == "kept.begin.sync":
        home.load.leave_half()
    if name == "logs.take_back.cut":
        home.load.drip()


def leave_what_it_meets(home, name):
    """Leftovers of lives before that only some points are about."""
    if name == "blobs.sweep.remove":
        with open(os.path.join(home.head.home, "blobs", ".coming-left"), "wb") as file:
            file.write(b"half of an upload")


def dies_under_load(home, armed):
    """Whether a head that is armed so dies, at the start, under load, or when it is stopped."""
    if not home.head.begin(armed):
        return home.head.dead()
    try:
        for _ in range(ROUNDS_MAX):
            home.load.round()
            if home.head.dead():
                return True
    except (HeadGone, Refused):
        home.head.await_death()
        return True
    return dies_stopping(home)


def dies_starting(home, armed):
    if not home.head.begin(armed):
        return home.head.dead()
    try:
        wait_until(lambda: home.head.dead() or home.head.sees_nodes(), "the nodes are up")
    except (HeadGone, Refused):
        home.head.await_death()
    return home.head.dead()


def dies_stopping(home):
    """Whether it dies where it is stopped as an operator does, with jobs that go on."""
    try:
        home.head.ask("POST", "/v1/stop", {"keep_jobs": True})
    except HeadGone:
        pass
    home.head.head.wait(timeout=60)
    return home.head.dead()
