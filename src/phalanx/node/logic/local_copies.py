"""Paths of a node's local copies of checkpoints and outputs, for gangs whose nodes do not share the head's folders. No file access.

<node folder>/checkpoints/<folder of the attempt>/step-<8 digits>/    this node's part of its checkpoints; complete for the one it resumes from
<scratch folder of the attempt>/outputs/                              what its ranks write for the user; removed with the attempt

The head's folders have random keys in their names, and these have the same names. So files of earlier jobs with the same id are never used.
"""

from __future__ import annotations

import os

from phalanx.core.state.commands import PrepareTasks
from phalanx.core.work.job import PublishedCheckpoint


def checkpoints_root(node_folder: str) -> str:
    """Return the folder of the node's own checkpoints of all jobs."""
    return os.path.join(node_folder, "checkpoints")


def checkpoints_folder(node_folder: str, prepare: PrepareTasks) -> str:
    """Return the folder of the node's own checkpoints of a job."""
    return os.path.join(checkpoints_root(node_folder), os.path.basename(os.path.dirname(prepare.checkpoint_dir)))


def outputs_folder(scratch_folder: str) -> str:
    """Return the folder of the node's own outputs of an attempt."""
    return os.path.join(scratch_folder, "outputs")


def head_stores_checkpoints(prepare: PrepareTasks) -> bool:
    """Whether the head stores this attempt's checkpoints; a path that the user named is not copied."""
    return prepare.kept and not prepare.spec.checkpoint


def in_object_store(prepare: PrepareTasks) -> bool:
    """Whether an object store holds this attempt's checkpoints."""
    return "://" in prepare.spec.checkpoint


def outputs_in_object_store(prepare: PrepareTasks) -> bool:
    """Whether an object store holds the outputs of this attempt's job."""
    return bool(prepare.spec.outputs)


def has_local_outputs(prepare: PrepareTasks) -> bool:
    """Whether ranks write outputs into a folder of the node, and the supervisor stores them: at the head, or in an object store."""
    return prepare.kept or outputs_in_object_store(prepare)


def has_local_checkpoints(prepare: PrepareTasks) -> bool:
    """Whether ranks save into a folder of the node, and the supervisor stores the checkpoint: at the head, or in an object store."""
    return in_object_store(prepare) or head_stores_checkpoints(prepare)


def epoch_folder(own: str, prepare: PrepareTasks) -> str:
    """Return the folder that an attempt saves to, under the node's own checkpoints of its job."""
    return os.path.join(own, os.path.basename(prepare.checkpoint_dir))


def local_checkpoint_path(prepare: PrepareTasks, resume: PublishedCheckpoint, own: str) -> str | None:
    """Return the local path of a checkpoint that the head or an object store holds; None for one at a path that the user named."""
    if not has_local_checkpoints(prepare) or not resume.path.startswith(os.path.dirname(prepare.checkpoint_dir) + "/"):
        return None
    return os.path.join(own, os.path.basename(os.path.dirname(resume.path)), f"step-{resume.step:08d}")


def stored_checkpoint_path(prepare: PrepareTasks, own: str, path: str) -> str | None:
    """Return the path at the head, or the address in the object store, of the checkpoint at the local `path`; None for any other path."""
    folder, name = os.path.split(path)
    if not has_local_checkpoints(prepare) or folder != epoch_folder(own, prepare):
        return None
    return f"{prepare.checkpoint_dir}/{name}"
