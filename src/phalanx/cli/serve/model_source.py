"""The model that a job wrote to its outputs: which folder it is, and the labels that keep its lineage with the revision that serves it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.work.states import JobState

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.jobs import JobView

JOB_LABEL: Final = "phalanx-model-job"
STEP_LABEL: Final = "phalanx-model-step"
DIGEST_LABEL: Final = "phalanx-model-sha256"
_DEPTH_MAX: Final = 2  # folders below the outputs that are searched
_FOLDERS_MAX: Final = 200
_LISTED_MAX: Final = 5  # names in one message
_STEP: Final = re.compile(r"(\d{1,15})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """A model in the outputs of a job.

    Attributes:
        path: absolute, of its folder or file.
        step: of the training; None if neither the folder nor the job says it.
        size_bytes: of all files of the folder.
    """

    job: JobView
    path: str
    step: int | None
    size_bytes: int

    def labels(self, digest: str) -> dict[str, str]:
        """Return the labels of the revision."""
        step = {} if self.step is None else {STEP_LABEL: str(self.step)}
        return {JOB_LABEL: self.job.id, **step, DIGEST_LABEL: digest}


def source_text(labels: Mapping[str, str]) -> str:
    """Describe where the model of a revision came from; "" if it came from no job."""
    if JOB_LABEL not in labels:
        return ""
    step = f", step {labels[STEP_LABEL]}" if STEP_LABEL in labels else ""
    digest = f", sha256 {labels[DIGEST_LABEL]}" if labels.get(DIGEST_LABEL) else ""
    return f"of job {labels[JOB_LABEL]}{step}{digest}"


def find_job_model(head: Client, word: str, folder: str | None) -> JobModel:
    """Return the model of JOB or JOB:STEP in its outputs: in `folder`, or the one with the highest step.

    Raises:
        NotFound: no such job, or it wrote no model.
        BadRequest: it wrote several, and their names have no steps.
    """
    name, colon, step_text = word.partition(":")
    if colon and not step_text.isdecimal():
        raise BadRequest(
            f"--from-job {word!r}: {step_text!r} is not a step", hint="--from-job 17, or --from-job 17:1000"
        )
    job = head.job(resolve_job(head, name)).job
    found = _model_folders(head, job.id, (folder or "").strip("/"))
    if colon:
        found = {path: size for path, size in found.items() if _step_of(path) == int(step_text)}
    if not found:
        what = f"no model of step {step_text}" if colon else "no model"
        place = f" in {folder}" if folder else ""
        raise NotFound(
            f"job {job.id} wrote {what} to its outputs{place}",
            hint="let it write one there that engines load: model.save_pretrained(os.environ['PHALANX_OUTPUT_DIR'] + '/model')",
        )
    steps = {path: step for path in found if (step := _step_of(path)) is not None}
    if len(found) > 1 and len(steps) < len(found):
        names = ", ".join(sorted(path or "." for path in found)[:_LISTED_MAX])
        raise BadRequest(
            f"job {job.id} wrote {len(found)} models: {names}",
            hint=f"name one: phalanx serve model {max(found)} --from-job {job.id}",
        )
    path = max(steps, key=lambda one: steps[one]) if len(found) > 1 else next(iter(found))
    step = steps.get(path)
    if step is None and job.state is JobState.SUCCEEDED and job.progress is not None:
        step = job.progress.step  # the last one
    return JobModel(job=job, path=os.path.join(job.output_dir, path).rstrip("/"), step=step, size_bytes=found[path])


def _model_folders(head: Client, job_id: str, begin: str) -> dict[str, int]:
    """Return the folders with a model, at `begin` and below, with their bytes."""
    found: dict[str, int] = {}
    folders, seen = [begin], 0
    while folders and seen < _FOLDERS_MAX:
        path = folders.pop(0)
        seen += 1
        entries = head.files(job_id, path).entries
        sizes = {os.path.basename(one.path): one.size_bytes for one in entries if one.kind == "file"}
        weights = any(one.endswith((".safetensors", ".bin")) for one in sizes)
        if ("config.json" in sizes and weights) or any(one.endswith(".gguf") for one in sizes):
            found[path] = sum(sizes.values())
        elif path.count("/") - begin.count("/") + bool(path) < _DEPTH_MAX + bool(begin):
            folders += [one.path for one in entries if one.kind == "folder"]
    return found


def _step_of(path: str) -> int | None:
    match = _STEP.search(os.path.basename(path))
    return None if match is None else int(match[1])
