"""The jobs of a sweep's trials on a cluster: how the values of a trial reach its program, and the calls that submit, read and cancel."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from phalanx.client import Client
from phalanx.core.errors import Conflict, NotFound, PhalanxError
from phalanx.sweep.definition import SweepDefinition
from phalanx.sweep.driver import TrialJob
from phalanx.sweep.space import variable_of
from phalanx.sweep.study import TrialRecord

SWEEP_LABEL: Final = "sweep"
TRIAL_LABEL: Final = "trial"
_NAME_CHARS_MAX: Final = 60  # of a job, so that lists of jobs stay readable
_LIVE: Final = ("pending", "running")
_PAGE: Final = 500


def placeholders(run: object, names: Sequence[str]) -> set[str]:
    """Return the parameters that a command names as {NAME}."""
    text = run if isinstance(run, str) else " ".join(map(str, run)) if isinstance(run, list | tuple) else ""
    return {name for name in names if "{" + name + "}" in text}


def trial_job(definition: SweepDefinition, number: int, values: Mapping[str, str]) -> dict[str, object]:
    """Return the keys of the job file of a trial."""
    job = dict(definition.job)
    run = job["run"]
    options = [f"--{name}={value}" for name, value in values.items()] if definition.append else []
    if isinstance(run, str):  # for a shell
        filled = _filled(run, {name: shlex.quote(value) for name, value in values.items()})
        job["run"] = " ".join([filled.rstrip(), *map(shlex.quote, options)])
    else:
        assert isinstance(run, list)
        job["run"] = [*(_filled(str(word), values) for word in run), *options]
    given_env: Any = job.get("env") or {}
    job["env"] = {
        **given_env,
        **{variable_of(name): value for name, value in values.items()},
        "SWEEP_NAME": definition.name,
        "SWEEP_TRIAL": str(number),
    }
    given_labels: Any = job.get("labels") or {}
    ours = {SWEEP_LABEL: definition.name, TRIAL_LABEL: str(number)}
    job["labels"] = {**given_labels, **values, **ours}
    shown = " ".join(f"{name}={value}" for name, value in values.items())
    job["name"] = f"{definition.name}/{number} {shown}"[:_NAME_CHARS_MAX]
    if job.get("checkpoint"):  # trials must not resume from each other
        job["checkpoint"] = f"{str(job['checkpoint']).rstrip('/')}/{definition.name}-{number}"
    return job


class ClusterTrialJobs:
    """The jobs of one sweep on the cluster of a client."""

    def __init__(self, head: Client, definition: SweepDefinition) -> None:
        self._head = head
        self._definition = definition
        self._user = ""

    def submit(self, trial: TrialRecord) -> str:
        """Submit the job of a trial. The key makes a second call return the same job."""
        key = f"sweep-{self._definition.id}-{trial.number}"
        return self._head.submit(trial_job(self._definition, trial.number, trial.values), key=key).id

    def look(self, job_ids: Sequence[str]) -> Mapping[str, TrialJob]:
        """Return these jobs by id: the live ones from one list, the others one by one."""
        if not job_ids:
            return {}
        self._user = self._user or self._head.me().user
        wanted = set(job_ids)
        found: dict[str, TrialJob] = {}
        before = None
        while True:
            page = self._head.jobs(state=_LIVE, user=self._user, before_seq=before, limit=_PAGE)
            found.update({one.id: _trial_job(one) for one in page.jobs if one.id in wanted})
            before = page.next
            if before is None or len(found) == len(wanted):
                break
        for job_id in wanted - set(found):
            try:
                found[job_id] = _trial_job(self._head.job(job_id).job)
            except NotFound:
                found[job_id] = TrialJob(job_id=job_id, state="removed", ended=True, why="the head has no such job")
        return found

    def curve(self, job_id: str) -> Sequence[tuple[int, float | None]]:
        """Return the metric by step from the head's history; nothing while the history cannot answer."""
        try:
            curves = self._head.job_curves(job_id)
        except PhalanxError as error:
            if error.retry_helps:
                return ()
            raise
        values = curves.loss_last if self._definition.metric == "loss" else curves.step_s
        return list(zip(curves.step, values, strict=True))

    def cancel(self, job_id: str, why: str) -> None:
        """Cancel the job of a trial."""
        try:
            self._head.cancel(job_id, why)
        except Conflict:  # it has ended
            pass


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Fill in the values in one pass, so that a value which looks like a placeholder stays as it is."""
    names = "|".join(re.escape(name) for name in values)
    return re.sub(r"\{(" + names + r")\}", lambda found: values[found[1]], text)


def _trial_job(view: Any) -> TrialJob:
    progress = view.progress
    return TrialJob(
        job_id=view.id,
        state=str(view.state).lower(),
        ended=view.state.terminal,
        step=None if progress is None else progress.step,
        steps_total=None if progress is None else progress.steps_total,
        ended_s=view.ended_s,
        node=", ".join(view.nodes[:2]),
        why=view.detail if view.state.terminal else "",
    )
