"""Where nodes have what they do not share, what they leave of it on their disks, and who may publish. Real files in a folder of the test."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import os
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.state.commands import StartTasks
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.files import checkpoint_folders
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic import local_copies
from phalanx.node.logic.events import MemberKey
from phalanx.node.logic.variables.environment import NodeContext, rank_environment
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.scratch import scratch_of
from phalanx.node.prepare import path_probe
from phalanx.node.prepare.resume_checkpoint import check_storage
from tests.unit.test_environment import FOLDERS, job

OWN = replace(FOLDERS, checkpoints="/n/checkpoints/7", outputs="/n/attempts/7.3/outputs")
RESUME = PublishedCheckpoint(epoch=2, step=40, path="/c/7/epoch-2/step-00000040", digest="d")


def make_prepare(*, checkpoint="", **changes):
    order = job()
    return replace(order, spec=replace(order.spec, checkpoint=checkpoint), **changes)


def variables(order, resume=RESUME):
    grant = order.allocation.grants[1]
    start = StartTasks(node_id=grant.node_id, job_id="7", epoch=3, generation=0, port=1, resume=resume)
    view = NodeContext(base={}, devices=("GPU-0",), virtual=False, folders=OWN)
    return rank_environment(order, start, grant, 0, view)[0]


def test_ranks_on_nodes_that_share_nothing_find_the_nodes_own_folders():
    found = variables(make_prepare(kept=True))
    assert found["PHALANX_CHECKPOINT_DIR"] == "/n/checkpoints/7/epoch-3"
    assert found["PHALANX_RESUME_FROM"] == "/n/checkpoints/7/epoch-2/step-00000040"
    assert found["PHALANX_OUTPUT_DIR"] == "/n/attempts/7.3/outputs"
    assert found["PHALANX_CHECKPOINT_APART"] == "1"


def test_ranks_on_nodes_that_see_the_heads_folders_find_those():
    found = variables(make_prepare())
    assert found["PHALANX_CHECKPOINT_DIR"] == "/c/7/epoch-3"
    assert found["PHALANX_RESUME_FROM"] == RESUME.path
    assert found["PHALANX_OUTPUT_DIR"] == "/o/7"
    assert "PHALANX_CHECKPOINT_APART" not in found


def test_a_path_that_the_user_named_is_the_users_also_where_nodes_share_nothing():
    order = make_prepare(kept=True, checkpoint="/shared", checkpoint_dir="/shared/7/epoch-3")
    found = variables(order, replace(RESUME, path="/shared/7/epoch-2/step-00000040"))
    assert found["PHALANX_CHECKPOINT_DIR"] == "/shared/7/epoch-3"
    assert found["PHALANX_RESUME_FROM"] == "/shared/7/epoch-2/step-00000040"
    assert found["PHALANX_OUTPUT_DIR"] == "/n/attempts/7.3/outputs"
    assert (
        local_copies.stored_checkpoint_path(order, "/n/checkpoints/7", "/n/checkpoints/7/epoch-3/step-00000050") is None
    )


def test_what_lies_here_has_its_name_at_the_head_and_what_a_script_saved_elsewhere_has_none():
    order, own = make_prepare(kept=True), "/n/checkpoints/7"
    assert (
        local_copies.stored_checkpoint_path(order, own, f"{own}/epoch-3/step-00000050") == "/c/7/epoch-3/step-00000050"
    )
    assert local_copies.stored_checkpoint_path(order, own, "/mnt/mine/step-00000050") is None
    assert local_copies.local_checkpoint_path(order, replace(RESUME, path="/mnt/mine/step-00000040"), own) is None


def test_copies_of_jobs_and_attempts_with_the_same_numbers_lie_apart_where_their_keys_differ():
    """Numbers are assigned again after a restore, and a node keeps copies of the jobs before."""
    orders = [make_prepare(kept=True, checkpoint_dir=f"/c/7-{key}/epoch-3-{key}") for key in ("old", "new")]
    owns = [local_copies.checkpoints_folder("/n", order) for order in orders]
    assert owns == ["/n/checkpoints/7-old", "/n/checkpoints/7-new"]
    assert local_copies.epoch_folder(owns[1], orders[1]) == "/n/checkpoints/7-new/epoch-3-new"
    lost = replace(RESUME, path="/c/7-old/epoch-2-old/step-00000040")
    assert local_copies.local_checkpoint_path(orders[1], lost, owns[1]) is None


def folder(root, *names):
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("x")


def names(root):
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*"))


def test_before_an_attempt_the_own_copies_are_those_it_may_resume_from_and_those_on_their_way(tmp_path):
    folder(
        tmp_path,
        "epoch-1/step-00000010",
        "epoch-2/step-00000020",
        "epoch-2/step-00000030",
        "epoch-3/step-00000040.tmp-0",
        "epoch-3/step-00000040.tmp-3-0",
    )
    keep = {str(tmp_path / "epoch-2/step-00000020"), str(tmp_path / "epoch-2/step-00000030")}
    checkpoint_folders.remove_unneeded_copies(str(tmp_path), keep)
    assert names(tmp_path) == ["epoch-2/step-00000020", "epoch-2/step-00000030"]
    assert not (tmp_path / "epoch-1").exists()


def test_of_what_an_attempt_saves_a_node_keeps_two_and_what_is_on_its_way_or_being_written(tmp_path):
    epoch = tmp_path / "epoch-1"
    being_written = ("step-00000050.tmp-0", "step-00000050.tmp-1-0")
    folder(epoch, "step-00000010", "step-00000020", "step-00000030", "step-00000040", *being_written)
    checkpoint_folders.remove_old_copies(str(epoch), {str(epoch / "step-00000010")})
    assert [path.name for path in sorted(epoch.iterdir())] == [
        "step-00000010",
        "step-00000030",
        "step-00000040",
        *being_written,
    ]


def test_copies_of_jobs_that_left_are_bounded_and_those_of_jobs_that_are_here_stay(tmp_path):
    for age, name in enumerate(("9", "8", "7", "6", "5", "4")):
        folder(tmp_path / name, "epoch-1/step-00000010")
        for path in (tmp_path / name / "epoch-1", tmp_path / name):
            os.utime(path, (1000.0 - age, 1000.0 - age))
    checkpoint_folders.remove_departed_jobs(str(tmp_path), {"4"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6", "7", "8", "9"]


def member(order, node_rank, root):
    grant = order.allocation.grants[node_rank]
    key = MemberKey(order.job_id, order.epoch, order.generation)
    scratch = scratch_of(str(root), order.job_id, order.epoch)
    return MemberRuntime(key=key, prepare=order, grant=grant, scratch=scratch, workdir="/")


def test_a_named_path_that_is_one_folder_on_all_nodes_is_found_to_be_one(tmp_path):
    order = make_prepare(checkpoint=str(tmp_path), checkpoint_dir=str(tmp_path))
    members = [member(order, rank, tmp_path) for rank in range(len(order.allocation.grants))]
    for one in members:
        path_probe.create_marker(one)
    assert path_probe.find_missing_markers(members[0]) == ""
    for one in members:
        path_probe.remove_marker(one)
    assert list(Path(tmp_path).iterdir()) == []


def test_a_named_path_that_is_another_folder_on_another_node_is_told_with_who_does_not_see_whom(tmp_path, monkeypatch):
    monkeypatch.setattr(path_probe, "_PATIENCE_S", 0.0)
    order = make_prepare(checkpoint="/ck", checkpoint_dir=str(tmp_path / "n0"))
    (tmp_path / "n0").mkdir()
    first = member(order, 0, tmp_path)
    path_probe.create_marker(first)
    first_id, second_id = (grant.node_id for grant in order.allocation.grants[:2])
    assert f"{first_id} does not see the files of {second_id} in /ck" in path_probe.find_missing_markers(first)


def test_a_node_that_lost_sight_of_the_heads_folders_takes_no_gang_that_rests_on_them(tmp_path):
    shared, apart = (member(make_prepare(kept=kept), 0, tmp_path) for kept in (False, True))
    with pytest.raises(PreparationFailed):
        check_storage(shared, sees=False)
    for one, sees in ((shared, True), (shared, None), (apart, False)):
        check_storage(one, sees=sees)
