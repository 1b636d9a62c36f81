"""submitit's view of a job of Phalanx, and the watcher that reads the states of all jobs together."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from typing import Any, Final, TypeVar

from submitit.core import core, utils

from phalanx.client import Client
from phalanx.core.errors import NotFound, PhalanxError
from phalanx.submitit.states import STATES, array_states

R_co = TypeVar("R_co", covariant=True)
_DELAY_S: Final = 10  # submitit looks again after 2 s, 4 s, and so on up to this
_PAGE: Final = 500
CLUSTER_OF_JOB: Final = "SUBMITIT_PHALANX_CLUSTER"  # the saved cluster; a job may not set PHALANX_CLUSTER
_log = logging.getLogger(__name__)


def head_client() -> Client:
    """Return the client of the head that the environment names, the same one each time."""
    if CLUSTER_OF_JOB in os.environ:
        os.environ.setdefault("PHALANX_CLUSTER", os.environ[CLUSTER_OF_JOB])
    return _client(*(os.environ.get(name, "") for name in ("PHALANX_CLUSTER", "PHALANX_URL", "PHALANX_HOME")))


@functools.cache
def _client(*_: str) -> Client:
    return Client()


class PhalanxInfoWatcher(core.InfoWatcher):
    """Reads the states of all jobs: one list of the user's jobs that have not ended, and once each job that has."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state in the words of Slurm: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT; UNKNOWN before the first look."""
        return self.get_info(job_id, mode=mode).get("State") or "UNKNOWN"

    def update(self) -> None:
        """Read the states of all jobs that have not ended."""
        wanted = self._registered - self._finished
        if not wanted:
            return
        self._num_calls += 1
        try:
            self._info_dict.update(_read_states(head_client(), wanted))
        except PhalanxError as error:
            _log.warning("the states of %d jobs are not known: %s", len(wanted), error)
        self._last_status_check = time.time()
        self._finished |= {one for one in wanted if self.is_done(one, mode="cache")}


class PhalanxJob(core.Job[R_co]):
    """A function that runs as a job, or as one element of an array."""

    watcher = PhalanxInfoWatcher(delay_s=_DELAY_S)

    def cancel(self, check: bool = True) -> None:
        """Cancel the job.

        Raises:
            PhalanxError: with `check`, if the head refuses.
        """
        with contextlib.nullcontext() if check else contextlib.suppress(PhalanxError):
            head_client().cancel(self.job_id)

    def results(self) -> list[R_co]:
        """Return the results of all tasks, once the job has ended.

        Raises:
            RuntimeError: a task failed, or has no result (submitit's FailedJobError, UncompletedJobError).
        """
        if self._sub_jobs:
            self.wait()
            if not all(one.paths.result_pickle.exists() for one in self._sub_jobs):
                error = self.exception()
                if error is not None:
                    raise error
        return super().results()

    def exception(self) -> utils.UncompletedJobError | None:
        """Return the error of the first task that failed, once the job has ended.

        A task that fails ends the others, which may have no result then: its error says why, so it goes before theirs.
        """
        if not self._sub_jobs:
            return super().exception()
        self.wait()
        for one in sorted(self._sub_jobs, key=lambda one: not one.paths.result_pickle.exists()):
            error = one.exception()
            if error is not None:
                return error
        return None

    def _interrupt(self, timeout: bool = False) -> None:
        """Preempt the job, for tests: it checkpoints and runs again.

        Raises:
            NotImplementedError: with `timeout`, which Slurm's plugin simulates by a signal.
        """
        if timeout:
            raise NotImplementedError("a time limit is not simulated here: give the job a short timeout_min")
        head_client().requeue(self.job_id)


def _read_states(client: Client, wanted: set[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for array in {one.partition("_")[0] for one in wanted if "_" in one}:
        states = _read_array(client, array)
        found |= {one: states.get(one, {"State": "NOT_FOUND"}) for one in wanted if one.startswith(f"{array}_")}
    missing = {one for one in wanted if "_" not in one}
    before: int | None = None
    if len(missing) > 1:
        user = _user(client)
        while missing:
            page = client.jobs(state=("pending", "running"), user=user, before_seq=before, limit=_PAGE)
            for job in page.jobs:
                if job.id in missing:
                    missing.discard(job.id)
                    found[job.id] = _info(job)
            before = page.next
            if before is None:
                break
    for one in missing:
        try:
            found[one] = _info(client.job(one).job)
        except NotFound:
            found[one] = {"State": "NOT_FOUND"}
    return found


def _read_array(client: Client, array: str) -> dict[str, dict[str, str]]:
    try:
        job = client.job(array).job
    except NotFound:
        return {}
    return {f"{array}_{index}": {"State": state} for index, state in array_states(job.state_elements).items()}


def _info(job: Any) -> dict[str, str]:
    return {"State": STATES[job.state], "NodeList": ",".join(job.nodes), "Detail": job.detail}


@functools.lru_cache(maxsize=8)
def _user(client: Client) -> str:
    return str(client.me().user)
