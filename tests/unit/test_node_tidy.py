"""Checkpoint folders of attempts that never saved."""

from __future__ import annotations

from phalanx.node.files import checkpoint_folders


def test_empty_checkpoint_folders_go_and_others_stay(tmp_path):
    root = tmp_path / "checkpoints"
    empty, older, saved = root / "1" / "epoch-1", root / "2" / "epoch-1", root / "2" / "epoch-2"
    for folder in (empty, older, saved / "step-00000001"):
        folder.mkdir(parents=True)
    for folder in (empty, older, saved):
        checkpoint_folders.remove_empty_folders(str(folder))
        checkpoint_folders.remove_empty_folders(str(folder))
    checkpoint_folders.remove_empty_folders("")
    checkpoint_folders.remove_empty_folders("s3://bucket/1/epoch-1")
    assert sorted(path.relative_to(root).as_posix() for path in root.rglob("*")) == [
        "2",
        "2/epoch-2",
        "2/epoch-2/step-00000001",
    ]
