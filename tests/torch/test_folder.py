"""Folders of checkpoints in a directory that all epochs of a job share: what an old epoch does late reaches nothing of the new one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from phalanx.torch import checkpoint_folder
from phalanx.torch.checkpointer import Checkpointer
from phalanx.wire import manifest

pytestmark = pytest.mark.torch
STEP = 150


def begin(directory, epoch, generation=0):
    """Start a checkpoint of STEP as rank 0 of a fresh gang does; its temporary folder."""
    checkpoint_folder.remove_leftovers(str(directory))
    temporary = checkpoint_folder.temporary_folder(str(directory), STEP, epoch=epoch, generation=generation)
    checkpoint_folder.create_temporary(temporary)
    return Path(temporary)


def write(temporary, content):
    """One rank's file. DCP makes the folder where it is missing, and so does a rank whose folder was swept while it stood still."""
    temporary.mkdir(exist_ok=True)
    (temporary / "__0_0.distcp").write_bytes(content)


def seal(temporary, epoch):
    files = [checkpoint_folder.seal_file(str(temporary), "__0_0.distcp")]
    return checkpoint_folder.write_manifest(
        str(temporary), checkpoint_folder.encode_manifest(step=STEP, epoch=epoch, world_size=1, files=files)
    )


def test_no_two_epochs_or_restarts_write_to_one_folder(tmp_path):
    lives = [(1, 0), (1, 1), (2, 0), (2, 1), (11, 0), (1, 10)]
    names = {checkpoint_folder.temporary_folder(str(tmp_path), STEP, epoch=epoch, generation=n) for epoch, n in lives}
    assert len(names) == len(lives)


def test_rank_of_an_old_epoch_that_wakes_in_mid_write_reaches_nothing_that_the_new_one_seals(tmp_path):
    old = begin(tmp_path, epoch=1)
    new = begin(tmp_path, epoch=2)
    write(new, b"epoch 2")
    digest = seal(new, epoch=2)
    write(old, b"epoch 1")
    assert checkpoint_folder.commit(str(new), checkpoint_folder.step_folder(str(tmp_path), STEP)) is None
    manifest.verify(checkpoint_folder.step_folder(str(tmp_path), STEP), expected_digest=digest)


def test_rank_0_of_an_old_epoch_that_wakes_before_its_rename_leaves_the_new_ones_half_written_folder(tmp_path):
    old = begin(tmp_path, epoch=1)
    write(old, b"epoch 1")
    seal(old, epoch=1)
    new = begin(tmp_path, epoch=2)
    with pytest.raises(FileNotFoundError):
        checkpoint_folder.commit(str(old), checkpoint_folder.step_folder(str(tmp_path), STEP))
    assert [path.name for path in tmp_path.iterdir()] == [new.name]


def test_a_start_sweeps_what_any_release_left_on_its_way_and_nothing_that_is_whole(tmp_path):
    for name in ("step-00000100", "step-00000150.tmp-0", "step-00000150.tmp-1-0", "step-00000050.tmp-retired", "mine"):
        (tmp_path / name).mkdir()
    checkpoint_folder.remove_leftovers(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-00000100"]


def test_checkpoint_of_which_a_rank_wrote_elsewhere_gets_no_final_name(tmp_path):
    here, elsewhere = begin(tmp_path, epoch=1), tmp_path / "step-00000150.tmp-0"
    write(here, b"rank 0")
    elsewhere.mkdir()
    (elsewhere / "__1_0.distcp").write_bytes(b"rank 1")
    shards = [
        [checkpoint_folder.seal_file(str(here), "__0_0.distcp")],
        [checkpoint_folder.seal_file(str(elsewhere), "__1_0.distcp")],
    ]
    final = checkpoint_folder.step_folder(str(tmp_path), STEP)
    session = SimpleNamespace(rank=0, fence=SimpleNamespace(pass_=lambda: None))
    saver = SimpleNamespace(
        _session=session,
        _manifest=lambda _, files: checkpoint_folder.encode_manifest(step=STEP, epoch=1, world_size=2, files=files),
    )
    save = SimpleNamespace(temporary=str(here), final=final, step=STEP)
    digest, _, error = Checkpointer._commit(saver, save, shards)  # type: ignore[arg-type]
    assert digest is None
    assert "__1_0.distcp" in (error or "")
    assert not Path(final).exists()
