"""Where a node has its own copies of what the head keeps, when a gang's nodes do not share the head's folders. Paths as text; nothing is touched.

<node folder>/checkpoints/<job>/epoch-<e>/step-<8 digits>/    its part of what this attempt saved, and whole what it resumes from
<scratch folder of the attempt>/outputs/                      what its ranks write for the user; goes with the attempt
"""

from __future__ import annotations

import os

from phalanx.core.ids import Epoch, JobId
from phalanx.core.state.commands import Prepare
from phalanx.core.work.job import Resume


def checkpoints_of(node_folder: str, job_id: JobId) -> str:
    """The node's own checkpoints of a job."""
    return os.path.join(node_folder, "checkpoints", job_id)


def outputs_of(scratch_folder: str) -> str:
    """The node's own outputs of an attempt."""
    return os.path.join(scratch_folder, "outputs")


def keeps_checkpoints(prepare: Prepare) -> bool:
    """Whether the head keeps this attempt's checkpoints; a path that the user named is the user's own."""
    return prepare.kept and not prepare.spec.checkpoint


def epoch_folder(own: str, epoch: Epoch) -> str:
    """What an attempt saves to, under the node's own checkpoints of its job."""
    return os.path.join(own, f"epoch-{epoch}")


def own_copy(prepare: Prepare, resume: Resume, own: str) -> str | None:
    """Where this node has, or will have, a checkpoint that the head keeps; None for one that lies elsewhere, where the user said."""
    if not keeps_checkpoints(prepare) or not resume.path.startswith(os.path.dirname(prepare.checkpoint_dir) + "/"):
        return None
    return os.path.join(epoch_folder(own, resume.epoch), f"step-{resume.step:08d}")


def head_path(prepare: Prepare, own: str, path: str) -> str | None:
    """Under which name the head keeps what lies at `path` here; None for what lies elsewhere."""
    folder, name = os.path.split(path)
    if not keeps_checkpoints(prepare) or folder != epoch_folder(own, prepare.epoch):
        return None
    return f"{prepare.checkpoint_dir}/{name}"
