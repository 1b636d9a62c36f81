"""submitit's executor for Phalanx: each function is a job, `map_array` and `batch` are one array."""

from __future__ import annotations

import math
import os
import shlex
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from submitit.core import core, plugins, utils

from phalanx.client.connection.clusters import chosen_cluster
from phalanx.client.connection.discovery import find_urls, state_folder
from phalanx.core.errors import PhalanxError
from phalanx.core.work.sbatch_scripts.exported_variables import select_variables
from phalanx.submitit.job import CLUSTER_OF_JOB, PhalanxJob, head_client

_ARRAY_MAX: Final = 10_000  # elements; the head's limit
_TIMEOUT_MIN: Final = 5  # of a job whose executor has none; submitit's default on Slurm
_SIGNAL_DELAY_S: Final = 90  # submitit's default on Slurm
_SHARED: Final = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
# Keys of a job file that are parameters under the same name.
_JOB_KEYS: Final = frozenset(
    {
        "gpus",
        "project",
        "queue",
        "priority",
        "image",
        "env",
        "requirements",
        "software",
        "resources",
        "within",
        "prefer",
        "labels",
    }
    | {"nodelist", "exclude", "reservation", "depends_on", "begin", "preemptible", "hold", "retry", "allow_never"}
)
_OWN: Final = frozenset({"setup", "signal_delay_s", "array_parallelism", "export", "stderr_to_stdout"})


class _Parameters(set[str]):
    """All names of parameters; to iterate over, only those that no other executor has.

    For programs that write parameters without a prefix, as older ones do, AutoExecutor takes the last executor that lists the name: it stays theirs.
    """

    def __iter__(self) -> Iterator[str]:
        others = (one for one in plugins.get_executors().values() if one is not PhalanxExecutor)
        return iter(self.difference(*(one._valid_parameters() for one in others)))  # noqa: SLF001  # as AutoExecutor does


class PhalanxExecutor(core.PicklingExecutor):
    """Runs functions as jobs of Phalanx.

    The folder must be the same one on the nodes, as for every cluster of submitit.

    Args:
        folder: for pickles, results and logs.
        max_num_timeout: how often a job that can checkpoint runs again after its time limit.
        max_pickle_size_gb: of all pickles of one submission.
        python: shell words that start Python in the job; this program's own if None.
    """

    job_class = PhalanxJob

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = shlex.quote(sys.executable) if python is None else python

    @classmethod
    def affinity(cls) -> int:
        """Return 2 (a cluster, like Slurm, which wins where both are) if a head is known here, 3 inside of a job, else -1."""
        try:
            find_urls()
        except PhalanxError:
            return -1
        return 3 if "PHALANX_JOB_ID" in os.environ else 2

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return _Parameters(_JOB_KEYS | _OWN - {"stderr_to_stdout"})

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - _JOB_KEYS - _OWN - set(_SHARED))
        if unknown:
            known = ", ".join(sorted(_JOB_KEYS | _OWN | set(_SHARED)))
            raise ValueError(f"Unavailable parameter(s): {unknown}\nValid parameters are: {known}")
        super()._internal_update_parameters(**kwargs)

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        delayed = list(delayed_submissions)
        jobs: list[core.Job[Any]] = []
        for start in range(0, len(delayed), _ARRAY_MAX):
            jobs += self._submit_together(delayed[start : start + _ARRAY_MAX])
        return jobs

    def _submit_together(self, delayed: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """Submit one function as a job, several as an array, and hand over their pickles, for which the jobs wait."""
        count = len(delayed)
        pickles = self._write_pickles(delayed)
        body = job_body(self.parameters, self._submitit_command_str, self.folder)
        if all(hasattr(one.function, "checkpoint") for one in delayed):
            body["saves_on_stop"] = True
        if count > 1:
            at_once = min(count, int(self.parameters.get("array_parallelism", count)))
            body["array"] = f"0-{count - 1}%{at_once}"
        try:
            submitted = head_client().submit(body)
        except PhalanxError as error:
            for path in pickles:
                path.unlink()
            raise utils.FailedSubmissionError(str(error)) from error
        tasks = list(range(self._num_tasks()))
        ids = [submitted.id] if count == 1 else [f"{submitted.id}_{index}" for index in range(count)]
        jobs: list[core.Job[Any]] = [self.job_class(folder=self.folder, job_id=one, tasks=tasks) for one in ids]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _write_pickles(self, delayed: list[utils.DelayedSubmission]) -> list[Path]:
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        timeout_min = self.parameters.get("timeout_min", _TIMEOUT_MIN)
        found: list[Path] = []
        for one in delayed:
            path = folder / f"{uuid.uuid4().hex}.pkl"
            one.set_timeout(timeout_min, self.max_num_timeout)
            one.dump(path)
            found.append(path)
            size_gb = len(delayed) * found[0].stat().st_size / 1024**3
            if size_gb > self.max_pickle_size_gb:
                path.unlink()
                raise RuntimeError(
                    f"The pickles of this submission would be about {size_gb:.2f} GB, more than max_pickle_size_gb="
                    f"{self.max_pickle_size_gb:g}. Put large data into files, or raise executor.max_pickle_size_gb."
                )
        return found

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m submitit.core._submit {shlex.quote(str(self.folder))}"

    def _num_tasks(self) -> int:
        return int(self.parameters.get("nodes", 1)) * max(1, int(self.parameters.get("tasks_per_node", 1)))

    # The base class asks for these; `_submit_together` replaces what calls them.

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError


def job_body(parameters: dict[str, Any], command: str, folder: Path) -> dict[str, Any]:
    """Return the job, as the keys of a job file."""
    tasks = max(1, int(parameters.get("tasks_per_node", 1)))
    delay_s = int(parameters.get("signal_delay_s", _SIGNAL_DELAY_S))
    body: dict[str, Any] = {
        "run": ["bash", "-c", _task_script(parameters, command, folder)],
        "name": parameters.get("name", "submitit"),
        "tasks_per_node": tasks,
        "time": f"{max(1, math.ceil(60 * parameters.get('timeout_min', _TIMEOUT_MIN)))}s",
        "grace": f"{max(1, delay_s)}s",
        "workdir": os.getcwd(),
    }
    if "gpus" not in parameters:
        gpus = int(parameters.get("gpus_per_node", 0))
        body |= {"nodes": parameters.get("nodes", 1), **({"gpus_per_node": gpus} if gpus else {"gpus": 0})}
    if "cpus_per_task" in parameters or not (parameters.get("gpus_per_node") or "gpus" in parameters):
        body["cpus"] = tasks * int(parameters.get("cpus_per_task", 1))
    if "mem_gb" in parameters:
        body["memory"] = parameters["mem_gb"]
    body |= {name: value for name, value in parameters.items() if name in _JOB_KEYS}
    body["env"] = _variables(parameters) | {"SUBMITIT_PHALANX_SIGNAL_DELAY_S": str(delay_s)}
    return body


def _task_script(parameters: dict[str, Any], command: str, folder: Path) -> str:
    """Return what bash runs as each task: output goes to submitit's files, as on Slurm."""
    paths = utils.JobPaths(folder)
    names = {"%A": "${PHALANX_ARRAY_JOB_ID:-$PHALANX_JOB_ID}", "%a": "${PHALANX_ARRAY_TASK_ID:-}"}
    names |= {"%j": "$PHALANX_JOB_ID", "%t": "$RANK"}

    def word(path: Path) -> str:
        text = shlex.quote(str(path))
        for tag, variable in names.items():
            text = text.replace(tag, f"'\"{variable}\"'" if text.startswith("'") else f'"{variable}"')
        return text

    where = word(paths.stdout)
    error = "2>&1" if parameters.get("stderr_to_stdout") else f"2>> {word(paths.stderr)}"
    return "\n".join(
        (
            f"mkdir -p -- {word(paths.folder)} || exit 1",
            f"echo output is in {where}",
            f"exec >> {where} {error}",
            *(parameters.get("setup") or ()),
            f"exec {command}",
        )
    )


def _variables(parameters: dict[str, Any]) -> dict[str, str]:
    """Return this program's variables, as sbatch would export them, those of `env`, and the head for a job that submits or requeues."""
    kept, _ = select_variables(str(parameters.get("export", "ALL")), os.environ)
    for name in ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT"):  # of this machine
        kept.pop(name, None)
    cluster, url = chosen_cluster(), os.environ.get("PHALANX_URL", "")
    if cluster is not None:
        kept[CLUSTER_OF_JOB] = cluster.name
    else:
        kept["PHALANX_URL" if url else "PHALANX_HOME"] = url or state_folder()
    given = parameters.get("env") or {}
    return {**kept, **{str(name): str(value) for name, value in given.items()}, "SUBMITIT_EXECUTOR": "phalanx"}
