"""A whole cluster in virtual time, with the words in which scenarios speak: `phalanx.simulator.drill.cluster` and what tests add.

After every event the invariants of DESIGN 3 are checked, so that a scenario need only state its own point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from phalanx.core.ids import JobId, ProjectId, QueueId, UserId
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import CancelJob, SubmitJob
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.states import AttemptState, JobState
from phalanx.simulator.drill.behaviour import JobBehaviour
from phalanx.simulator.drill.cluster import DrillCluster
from tests.builders import make_fleet, spec


class Harness(DrillCluster):
    """See the module."""

    def __init__(
        self,
        fleet: str = "r: n0=4 n1=4 n2=4",
        *,
        policy: PolicySettings | None = None,
        lease_s: float = 6.0,
        offers: str = "",
        unmountable: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._names = 0
        nodes = make_fleet(fleet, offers=offers).nodes.values()
        made = [replace(node, mounts_error=unmountable.get(node.id, "")) for node in nodes]
        super().__init__(made, policy=policy, lease_s=lease_s)

    def submit(
        self,
        one: JobSpec | None = None,
        *,
        key: str = "",
        behaviour: JobBehaviour | None = None,
        queue: str = "default",
        user: str = "ada",
        **fields: Any,
    ) -> JobId:
        """Submit; the spec by its fields, the behaviour of the job beside it."""
        self._names += 1
        wanted = one or spec(**{"name": f"job{self._names}", **fields})
        if behaviour is not None:
            self.behaviours[wanted.name] = behaviour
        job: Job = self.request(
            SubmitJob(
                spec=wanted,
                user=UserId(user),
                project=ProjectId("gpt"),
                queue=QueueId(queue),
                key=key,
                body_sha256=repr(wanted),
            )
        )
        self.invariants.record_submit(job.id)
        return job.id

    def cancel(self, job_id: JobId) -> Job:
        answer: Job = self.request(CancelJob(job_id=job_id, by=UserId("ada")))
        self.invariants.record_cancel(answer)
        return answer

    def job(self, job_id: JobId) -> Job:
        """As the store holds it: committed truth."""
        found = self.store.job(job_id)
        assert found is not None
        return found

    def attempts(self, job_id: JobId) -> list[Attempt]:
        return self.store.attempts(job_id)

    def live(self, job_id: JobId) -> Attempt:
        return self.world.attempts[job_id]

    def is_(self, job_id: JobId, state: JobState) -> Callable[[], bool]:
        return lambda: self.job(job_id).state is state

    def attempt_is(self, job_id: JobId, state: AttemptState) -> Callable[[], bool]:
        return lambda: job_id in self.world.attempts and self.world.attempts[job_id].state is state

    def runs(self, job_id: JobId) -> None:
        """Wait until its ranks run."""
        self.until(self.attempt_is(job_id, AttemptState.RUNNING))

    def ends(self, job_id: JobId, limit_s: float = 200.0) -> Job:
        """Wait for its end."""
        self.until(lambda: self.job(job_id).state.terminal, limit_s)
        return self.job(job_id)

    def kinds(self, job_id: JobId) -> list[str]:
        return [line.kind for line in self.store.history(job_id=job_id, limit=10_000)]
