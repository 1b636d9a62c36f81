"""Checkpoints of a gang whose nodes share no folder: each node has its part, and together they are one."""

from __future__ import annotations

import os
import shutil

import pytest

pytest.importorskip("torch")

from phalanx.wire import manifest
from tests.torch.gang import LOOP, Gang
from tests.torch.test_checkpointer import losses

pytestmark = [pytest.mark.torch, pytest.mark.serial]


def two_nodes(tmp_path):
    return [tmp_path / "n0", tmp_path / "n1"]


def gang(tmp_path, name, *words, **options):
    return Gang(tmp_path / name, LOOP, "--every-steps", "5", *words, world_size=4, apart=two_nodes(tmp_path), **options)


def put_together(tmp_path, step, whole):
    """What the head does: the files of both nodes in one folder."""
    for node in two_nodes(tmp_path):
        shutil.copytree(node / step, whole / step, dirs_exist_ok=True)


def test_each_node_has_its_part_under_one_manifest_and_the_parts_are_the_whole(tmp_path):
    with gang(tmp_path, "a", "--steps", "10") as four:
        assert four.finish() == [0] * 4, four.log()
        (told,) = [report for report in four.of("checkpoint") if report["step"] == 10]
        (part,) = [report for report in four.of("shards") if report["step"] == 10]
    n0, n1 = (node / "step-00000010" for node in two_nodes(tmp_path))
    assert (told["rank"], told["path"]) == (0, str(n0))
    assert (part["rank"], part["path"], part["digest"]) == (2, str(n1), told["digest"])
    assert manifest.read(str(n0)) == manifest.read(str(n1))
    assert not {path.name for path in n0.iterdir()} & {path.name for path in n1.iterdir()} - {"manifest.json"}
    put_together(tmp_path, "step-00000010", tmp_path / "head")
    manifest.verify(str(tmp_path / "head/step-00000010"), expected_digest=told["digest"])


def test_ranks_resume_from_their_own_nodes_copy_with_the_losses_of_an_unbroken_run(tmp_path):
    with gang(tmp_path, "a", "--steps", "15") as four:
        assert four.finish() == [0] * 4, four.log()
        straight = losses(four)
    put_together(tmp_path, "step-00000005", tmp_path / "head")
    for node in two_nodes(tmp_path):
        shutil.rmtree(node)
        shutil.copytree(tmp_path / "head", node)
    with gang(tmp_path, "b", "--steps", "15", resume="step-00000005", epoch=2) as four:
        assert four.finish() == [0] * 4, four.log()
        assert losses(four) == {step: straight[step] for step in range(6, 16)}


def test_a_step_made_again_in_place_keeps_the_first_checkpoint_where_every_node_still_has_its_part(tmp_path):
    with gang(tmp_path, "a", "--steps", "5") as four:
        assert four.finish() == [0] * 4, four.log()
        (first,) = four.of("checkpoint")
    with gang(tmp_path, "b", "--steps", "5", generation=1) as four:
        assert four.finish() == [0] * 4, four.log()
        (again,) = four.of("checkpoint")
        assert [report["digest"] for report in four.of("shards")] == [first["digest"]]
    assert again["digest"] == first["digest"]
    os.truncate(tmp_path / "n1/step-00000005/rank-3.pt", 1)
    with gang(tmp_path, "c", "--steps", "5", generation=2) as four:
        assert four.finish() == [0] * 4, four.log()
        (anew,) = four.of("checkpoint")
    put_together(tmp_path, "step-00000005", tmp_path / "head")
    manifest.verify(str(tmp_path / "head/step-00000005"), expected_digest=anew["digest"])


def test_a_node_that_cannot_write_costs_the_checkpoint_and_not_the_training(tmp_path):
    (tmp_path / "n1").write_text("no folder")
    with gang(tmp_path, "a", "--steps", "7") as four:
        assert four.finish() == [0] * 4, four.log()
        assert four.of("checkpoint") == four.of("shards") == []
        (failed,) = four.of("checkpoint_failed")
        assert str(tmp_path / "n1") in failed["error"]
    assert list((tmp_path / "n0").iterdir()) == []
