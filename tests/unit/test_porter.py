"""What a porter leaves of a node's own copies while it brings checkpoints to the head. Real files in a folder of the test."""

# mypy: disable-error-code="arg-type"

import threading
from dataclasses import replace

from phalanx.core.work.job import Resume
from phalanx.node.shell.head_address import HeadAddress
from phalanx.node.shell.link import HeadAccess
from phalanx.node.shell.porter import Porter, Upload
from phalanx.node.shell.present import Presents
from tests.unit.test_kept import folder, make_prepare, member

PATIENCE_S = 30.0


def live(tmp_path, *steps, brought=None):
    """The members of an attempt that may resume from these steps of its own."""
    candidates = tuple(Resume(epoch=3, step=step, path=f"/c/7/epoch-3/step-{step:08d}", digest="d") for step in steps)
    order = make_prepare(kept=True, candidates=candidates)
    present = member(order, 0, tmp_path)
    present.checkpoints = str(tmp_path / "own")
    if brought is not None:
        present.brought = replace(candidates[0], step=brought, path=f"/c/7/epoch-3/step-{brought:08d}")
    presents = Presents()
    presents.add(present)
    return presents, order


def test_the_checkpoint_that_ranks_load_stays_while_an_earlier_generations_saves_still_travel(tmp_path):
    """Found by reading: a gang that started again in place lost it from under its ranks, once two newer ones lay there."""
    own = tmp_path / "own" / "epoch-3"
    folder(own, *(f"step-{step:08d}" for step in (10, 20, 30, 40, 50)))
    presents, order = live(tmp_path, 20, brought=30)
    ended = threading.Event()
    ended.set()  # nothing is brought any more, but what was to be is tidied behind
    access = HeadAccess(address=HeadAddress("http://127.0.0.1:1", None), token="t", ca_file=None)
    porter = Porter(access, ended, resumed=presents.resumed)
    done = threading.Event()
    porter.put(
        Upload(job_id=order.job_id, epoch=order.epoch, step=50, digest="d", folder=str(own / "step-00000050"), note=print)
    )  # fmt: skip
    porter._hands.submit((order.job_id, order.epoch), done.set)
    assert done.wait(PATIENCE_S)
    assert sorted(path.name for path in own.iterdir()) == [f"step-{step:08d}" for step in (20, 30, 40, 50)]


def test_what_an_attempt_resumes_from_is_that_attempts_alone(tmp_path):
    presents, order = live(tmp_path, 20)
    assert presents.resumed(order.job_id, order.epoch) == {str(tmp_path / "own/epoch-3/step-00000020")}
    assert presents.resumed(order.job_id, order.epoch + 1) == set()
    assert presents.resumed("other", order.epoch) == set()
