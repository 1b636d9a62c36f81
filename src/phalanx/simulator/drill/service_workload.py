"""Simulated users of services: they submit, update, scale, stop and submit again, beside users who submit jobs to the same nodes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.ids import ProjectId, QueueId, ServiceId, UserId
from phalanx.core.state.events import (
    CancelJob,
    RequeueJob,
    ScaleService,
    SleepReplicas,
    StopService,
    SubmitService,
    UpdateService,
)
from phalanx.core.state.records import SERVICES
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.services.service import Service, ServiceState
from phalanx.core.work.services.service_terms import ServiceTerms
from phalanx.core.work.spec import JobSpec, LaunchMode, Role
from phalanx.node.logic.events import MemberKey
from phalanx.simulator.drill.behaviour import CANARY_VALUE, JobBehaviour
from phalanx.simulator.drill.violations import require
from phalanx.simulator.drill.workload import UserSimulator

if TYPE_CHECKING:
    from phalanx.simulator.drill.cluster import DrillCluster

NAMES: Final = (ServiceId("web"), ServiceId("chat"))
SERVICE_SHARE: Final = 0.5  # of all requests; the others are about jobs
SETTLE_S: Final = (
    400.0  # a rollout of four replicas on a healed fleet, behind jobs of 30 s and failures that each pause for a minute
)
_ADA: Final = UserId("ada")
_GPT: Final = ProjectId("gpt")
_RANGES: Final = ((1, 1), (1, 3), (2, 2), (2, 4), (0, 2))
_SHAPES: Final = ("1", "1", "2", "4", "2x1", "1/2")
_GOOD: Final = JobBehaviour(run_s=1e9, ready_s=0.8)


def _crashes_after(after_s: float) -> Any:
    def ends(_key: MemberKey, rank: int) -> tuple[float, int | None, int | None] | None:
        return (after_s, None, 11) if rank == 0 else None

    return ends


KINDS: Final = (
    _GOOD,
    _GOOD,
    JobBehaviour(run_s=1e9, ready_s=4.0, prepare_s=1.0, hook_s=5.0),
    JobBehaviour(run_s=1e9, ready_s=0.5, failing_hooks=frozenset({1})),  # it falls asleep at the second try
    JobBehaviour(run_s=1e9, ready_s=0.5, failing_hooks=frozenset({2})),  # it does not wake
    JobBehaviour(run_s=1e9, ready_s=0.5, ignores_sigterm=True),
    JobBehaviour(run_s=1e9, ready_s=0.5, ends=_crashes_after(20.0)),
    JobBehaviour(run_s=1e9),  # never ready
    JobBehaviour(run_s=1e9, ready_s=2.0, ends=_crashes_after(0.5)),  # never gets that far
    JobBehaviour(run_s=3.0, ready_s=1.0),  # ends with code 0
    JobBehaviour(run_s=1e9, ready_s=1.0, refuses={"n1": "device 2 is sick"}),
    JobBehaviour(run_s=1e9, refuses=dict.fromkeys(("n0", "n1", "n2"), "!no such file: serve.py")),
)


class ServiceUserSimulator(UserSimulator):
    """Sends random requests about services and jobs."""

    def __init__(self, cluster: DrillCluster, dice: Random) -> None:
        super().__init__(cluster, dice)
        self._revisions = 0

    def start(self) -> None:
        """Create the queue tree, two jobs and a service that works."""
        super().start()
        self._submit_service(self._template(NAMES[0], _GOOD))

    def send_random_request(self) -> None:
        """Send one random request."""
        if self._dice.random() > SERVICE_SHARE:
            super().send_random_request()
            return
        name = self._dice.choice(NAMES)
        service = None if self._cluster.head is None else self._cluster.world.table(SERVICES).get(name)
        if service is None or service.stopped_by:
            self._submit_service(self._template(name))
        else:
            self._dice.choice(_REQUESTS)(self, service)

    def settle_services(self) -> None:
        """Check that every service serves once its revision works and its replicas fit, sleeps and wakes; then stop all (14, 17)."""
        cluster = self._cluster
        for name in NAMES:
            if (service := cluster.world.table(SERVICES).get(name)) is not None and not service.stopped_by:
                spec = self._template(name, _GOOD, shape="1", terms=ServiceTerms(replicas_min=2, replicas_max=2))
                cluster.request(UpdateService(service_id=name, by=_ADA, spec=spec))
                if service.scale == 0:
                    cluster.request(ScaleService(service_id=name, replicas=2, by=_ADA))
        for asleep in (0, 1, 0):
            self._settle_sleep(asleep)
        for name in NAMES:
            if cluster.world.table(SERVICES).get(name) is not None:
                once = cluster.request(StopService(service_id=name, by=_ADA))
                again = cluster.request(StopService(service_id=name, by=_ADA))
                require(once == again, 11, f"a second stop changed {once} to {again}")
        cluster.run(120.0)  # two graces
        left = {name: sorted(found) for name, found in cluster.world.relations.replicas.items()}
        require(not left, 12, f"replicas of stopped services live: {left}")

    def _settle_sleep(self, asleep: int) -> None:
        """Let so many replicas of each service sleep, and wait until they do and the others serve."""
        cluster = self._cluster
        for name in NAMES:
            if (service := cluster.world.table(SERVICES).get(name)) is not None and not service.stopped_by:
                cluster.request(SleepReplicas(service_id=name, by=_ADA, asleep=asleep))
        end_s = cluster.clock.boot_s + SETTLE_S
        while unsettled := [text for name in NAMES if (text := self._unsettled(name, asleep))]:
            require(cluster.clock.boot_s < end_s, 14, f"after {SETTLE_S:.0f} s: {'; '.join(unsettled)}")
            cluster.run_next()

    def _unsettled(self, name: ServiceId, asleep: int) -> str:
        """Why a service is not as it shall be; "" if it is."""
        world = self._cluster.world
        service = world.table(SERVICES).get(name)
        if service is None or service.stopped_by:
            return ""
        jobs = [world.jobs[job_id] for job_id in world.relations.replicas.get(name, ())]
        ready = [job.id for job in jobs if job.id in world.attempts and world.attempts[job.id].serving]
        right = all(job.replica is not None and job.replica.revision == service.last_revision for job in jobs)
        sleeping = [job.id for job in jobs if job.id in world.attempts and world.attempts[job.id].gave_devices_back]
        numbers = (len(jobs), len(ready), len(sleeping))
        if service.state is ServiceState.READY and right and numbers == (2, 2 - asleep, asleep):
            return ""
        return f"{name} is {service.state} with {sleeping} asleep, {ready} of {[job.id for job in jobs]} ready, {service.failure or 'no failure'}"

    # ---- requests --------------------------------------------------------------------------------------------------------

    def _template(
        self, name: ServiceId, kind: JobBehaviour | None = None, *, shape: str = "", terms: ServiceTerms | None = None
    ) -> JobSpec:
        """A new template; its number in the environment makes it differ from all others, and selects its behaviour."""
        dice = self._dice
        self._revisions += 1
        low, high = dice.choice(_RANGES)
        known = self._cluster.behaviours
        known[f"{name}#{self._revisions}"] = kind or dice.choice(KINDS)
        gpus = parse_gpus(shape or dice.choice(_SHAPES))
        asked = terms or ServiceTerms(replicas_min=low, replicas_max=high, ready_within_s=15.0)
        if not gpus.has_shares:
            asked = replace(asked, sleep="/sleep", wake="/wake_up")
        role = Role(
            argv=("python", "serve.py"),
            gpus=gpus,
            launch=LaunchMode.FIXED,
            tasks_per_node=1,
        )
        return JobSpec(
            name=name,
            role=role,
            workdir="/work",
            grace_s=dice.choice((1.0, 30.0)),
            env=(("API_KEY", CANARY_VALUE),),
            labels=(("behaviour", f"{name}#{self._revisions}"),),
            allow_never=True,
            preemptible=dice.random() < 0.3,
            service=asked,
        )

    def _submit_service(self, spec: JobSpec) -> None:
        """Submit twice: the second request must change nothing."""
        asked = SubmitService(
            spec=spec, user=_ADA, project=_GPT, queue=QueueId(self._dice.choice(("default", "research")))
        )
        once, again = self._ask(asked), self._ask(asked)
        if isinstance(once, Service) and isinstance(again, Service):
            require(
                once.last_revision == again.last_revision,
                11,
                f"one template became {once.revision} and {again.revision}",
            )

    def _update(self, service: Service) -> None:
        """Roll out a new revision, or go back to an earlier one."""
        if self._dice.random() < 0.3:
            number = self._dice.randint(1, service.last_revision)
            self._ask(UpdateService(service_id=service.id, by=_ADA, revision=number))
        else:
            self._ask(UpdateService(service_id=service.id, by=_ADA, spec=self._template(service.id)))

    def _scale(self, service: Service) -> None:
        self._ask(ScaleService(service_id=service.id, replicas=self._dice.randint(0, 4), by=_ADA))

    def _sleep(self, service: Service) -> None:
        """Let some replicas sleep, or wake some."""
        number, awake = self._dice.randint(0, 3), self._dice.random() < 0.4
        asked = {"awake": number} if awake else {"asleep": number}
        self._ask(SleepReplicas(service_id=service.id, by=_ADA, **asked))

    def _disturb(self, service: Service) -> None:
        """Cancel or requeue one replica, as if it were a job."""
        found = sorted(self._cluster.world.relations.replicas.get(service.id, ())) if self._cluster.head else []
        if found:
            job_id, kind = self._dice.choice(found), self._dice.choice((CancelJob, RequeueJob))
            self._ask(kind(job_id=job_id, by=_ADA))

    def _stop(self, service: Service) -> None:
        if self._dice.random() < 0.2:
            self._ask(StopService(service_id=service.id, by=_ADA))


_REQUESTS: Final = (
    ServiceUserSimulator._update,  # noqa: SLF001  # a table of this module
    ServiceUserSimulator._update,  # noqa: SLF001
    ServiceUserSimulator._scale,  # noqa: SLF001
    ServiceUserSimulator._scale,  # noqa: SLF001
    ServiceUserSimulator._sleep,  # noqa: SLF001
    ServiceUserSimulator._sleep,  # noqa: SLF001
    ServiceUserSimulator._sleep,  # noqa: SLF001
    ServiceUserSimulator._disturb,  # noqa: SLF001
    ServiceUserSimulator._stop,  # noqa: SLF001
)
