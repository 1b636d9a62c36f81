"""Submits: creates a job, or all elements of an array in one step. Everything is validated before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from phalanx.controller import reservations
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted
from phalanx.core.ids import JobId
from phalanx.core.lifecycle import dependencies
from phalanx.core.lifecycle.dependencies import JobStates
from phalanx.core.scheduling.shape import acceptable_shapes
from phalanx.core.scheduling.submission import check_topology
from phalanx.core.state.events import SubmitJob
from phalanx.core.state.records import IDEMPOTENCY, PROJECTS, USERS, Idempotency
from phalanx.core.state.story import StoryLine
from phalanx.core.work.array import format_indices, parse_array
from phalanx.core.work.dependency import (
    ArrayPosition,
    Dependency,
    DependencyKind,
    array_element_id,
)
from phalanx.core.work.job import Job
from phalanx.core.work.launchers import MPI_LAUNCHERS, find_launcher
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.topology_constraint import fixed_to_one_node
from phalanx.core.work.users import User, UserRole

SHAPES_KEPT: Final = 4096  # distinct requests for one state of the fleet; some hundred bytes each
# Equal requests come by the thousand; finding the shapes is a tenth of a submit's cost.
_shapes_of = lru_cache(maxsize=SHAPES_KEPT)(acceptable_shapes)


def submit(turn: StepContext, wish: SubmitJob) -> Job | list[Job]:
    """Create the job, or the array's elements in order of their index. For a repeated key, return the earlier job or first element.

    Raises:
        PhalanxError: refused; nothing was changed.
    """
    world = turn.world
    if wish.key:
        earlier = world.table(IDEMPOTENCY).get((wish.user, wish.key))
        if earlier is not None:
            return _earlier_job(turn, wish, earlier)
    _check_project(turn, wish)
    if wish.queue not in world.queues:
        raise NotFound(f"no queue {wish.queue!r}", hint=f"there are: {', '.join(sorted(world.queues))}")
    reservations.check_named(turn, wish)
    _check_nodes(turn, wish)
    wish = _in_one_world(wish)
    shapes = _shapes_of(wish.spec.role, world.fleet())
    check_topology(wish.spec.topology, shapes, world.nodes.values())
    indices = parse_array(wish.spec.array).indices if wish.spec.array else ()
    parents = _parents(turn, wish, indices)
    if not indices:
        return _put(turn, wish, parents)
    return _put_array(turn, wish, indices, parents)


# ---- validation -----------------------------------------------------------------------------------------------------


def _check_nodes(turn: StepContext, wish: SubmitJob) -> None:
    """Check that all nodes of `nodelist` exist; nodes of `exclude` need not.

    Raises:
        NotFound: a node does not exist, so the job could never be placed.
    """
    unknown = [name for name in wish.spec.nodelist if name not in turn.world.nodes]
    if unknown:
        raise NotFound(f"nodelist: no node {unknown[0]}", hint="phalanx nodes lists them")


def _in_one_world(wish: SubmitJob) -> SubmitJob:
    """Keep a launcher that creates a world of its own at each call on one node, even if the fleet changes before the start."""
    role = wish.spec.role
    launcher = find_launcher(role.argv, role.script)
    if launcher not in MPI_LAUNCHERS or wish.spec.slurm:  # a batch script runs once, whatever it calls
        return wish
    if (role.gpus.nodes or 1) > 1 or role.gpus.nodes_max is not None:
        raise BadRequest(
            f"{launcher} starts once on each of the {role.gpus.nodes} nodes and would create {role.gpus.nodes} separate worlds",
            hint="ask for one node (--nodes 1), or start the ranks without it: phalanx run -- python train.py",
        )
    return replace(wish, spec=replace(wish.spec, role=replace(role, gpus=fixed_to_one_node(role.gpus))))


def _earlier_job(turn: StepContext, wish: SubmitJob, earlier: Idempotency) -> Job | list[Job]:
    if earlier.body_sha256 != wish.body_sha256:
        raise Conflict(
            f"idempotency key {wish.key!r} was used for another job ({earlier.job_id})", hint="use a new key"
        )
    job = turn.world.jobs.get(earlier.job_id)
    if job is None:
        raise Conflict(
            f"job {earlier.job_id} was created with this key and ended long ago", hint=f"phalanx show {earlier.job_id}"
        )
    return job if job.array is None else [job]


def _check_project(turn: StepContext, wish: SubmitJob) -> None:
    projects = turn.world.table(PROJECTS)
    project = projects.get(wish.project)
    if project is None:
        raise NotFound(f"no project {wish.project!r}", hint=f"there are: {', '.join(sorted(projects))}")
    user = turn.world.table(USERS).get(wish.user) or User(id=wish.user, role=UserRole.USER)
    member = not project.members or wish.user in project.members or wish.user in project.admins
    if not member and user.role not in (UserRole.OPERATOR, UserRole.ADMIN):
        raise NotPermitted(
            f"{wish.user} is not a member of project {project.id}", hint="ask one of its admins to add you"
        )


def _parents(turn: StepContext, wish: SubmitJob, indices: Sequence[int]) -> dict[JobId, JobStates]:
    """States of each job or array that the submit depends on, by the id used; for `aftercorr`, by each element's id.

    Raises:
        NotFound: no such job.
        BadRequest: `aftercorr` names a job that is not an array, or an array without these elements.
    """
    found: dict[JobId, JobStates] = {}
    for one in wish.spec.dependencies:
        if one.kind is DependencyKind.SINGLETON:
            continue
        states = dependencies.parent_states(turn.world, one.job_id, wish.parents.get(one.job_id))
        if one.kind is DependencyKind.AFTER_CORR:
            found |= _pairs(one, states, indices)
        else:
            found[one.job_id] = states
    return found


def _pairs(one: Dependency, states: JobStates, indices: Sequence[int]) -> dict[JobId, JobStates]:
    if one.job_id in states:
        raise BadRequest(f"{one}: job {one.job_id} is not an array", hint=f"write afterok:{one.job_id}")
    missing = [index for index in indices if array_element_id(one.job_id, index) not in states]
    if missing:
        raise BadRequest(
            f"{one}: array {one.job_id} has no element {format_indices(missing[:100])}",
            hint="give both arrays the same elements",
        )
    return {
        element: {element: states[element]} for element in (array_element_id(one.job_id, index) for index in indices)
    }


# ---- records --------------------------------------------------------------------------------------------------------


def _put(turn: StepContext, wish: SubmitJob, parents: Mapping[JobId, JobStates]) -> Job:
    seq = turn.change.new_job_seq()
    unmet, never = dependencies.unmet_of(turn.world, (wish.user, wish.spec.name), wish.spec.dependencies, parents)
    job = _put_one(turn, wish, wish.spec, (JobId(str(seq)), seq, None), (unmet, never))
    _remember_key(turn, wish, job)
    return job


def _put_array(
    turn: StepContext, wish: SubmitJob, indices: Sequence[int], parents: Mapping[JobId, JobStates]
) -> list[Job]:
    """Create one job for each element. All share one spec; `Job.array` holds the element's index, so that equal jobs stay equal."""
    seqs = [turn.change.new_job_seq() for _ in indices]
    array_id, name = JobId(str(seqs[0])), (wish.user, wish.spec.name)
    spec = _of_one_element(wish.spec)
    paired = [one for one in spec.dependencies if one.kind is DependencyKind.AFTER_CORR]
    common = tuple(one for one in spec.dependencies if one not in paired)
    shared, never = dependencies.unmet_of(turn.world, name, common, parents)
    jobs: list[Job] = []
    for index, seq in zip(indices, seqs, strict=True):
        place = ArrayPosition(
            array_id=array_id,
            index=index,
            size=len(indices),
            running_max=wish.spec.array_max,
            lowest=indices[0],
            highest=indices[-1],
        )
        own = [Dependency(kind=one.kind, job_id=array_element_id(one.job_id, index)) for one in paired]
        more, alone = dependencies.unmet_of(turn.world, name, own, parents) if own else ((), "")
        unmet = (*shared, *more) if more else shared
        jobs.append(
            _put_one(turn, wish, spec, (array_element_id(array_id, index), seq, place), (unmet, never or alone))
        )
    _remember_key(turn, wish, jobs[0])
    return jobs


def _of_one_element(spec: JobSpec) -> JobSpec:
    return replace(spec, array="", array_max=None)


def _put_one(
    turn: StepContext,
    wish: SubmitJob,
    spec: JobSpec,
    place: tuple[JobId, int, ArrayPosition | None],
    waits: tuple[tuple[Dependency, ...], str],
) -> Job:
    """Create one job. `place`: its id, seq and element; `waits`: its unmet conditions, and why one can never hold."""
    (job_id, seq, array), (unmet, never) = place, waits
    reason, detail = dependencies.first_reason(held=spec.hold, unmet=unmet, begin_s=spec.begin_s, now_s=turn.now.wall_s)
    job = Job(
        id=job_id,
        seq=seq,
        spec=spec,
        user=wish.user,
        project=wish.project,
        queue=wish.queue,
        submit_s=turn.now.wall_s,
        held=spec.hold,
        reason=reason,
        detail=detail,
        array=array,
        unmet_dependencies=unmet,
    )
    turn.change.put(job)
    text = f"submitted by {wish.user} for {wish.project}: {spec.role.gpus.total} GPUs" + (
        f"; {detail}" if unmet else ""
    )
    turn.change.add_story(
        StoryLine(seq=0, at_s=turn.now.wall_s, kind="submitted", text=text, job_id=job.id, by=wish.user)
    )
    if never:
        turn.apply(dependencies.cancel_unmeetable(job, never, turn.facts))
        return turn.world.jobs[job_id]
    return job


def _remember_key(turn: StepContext, wish: SubmitJob, first: Job) -> None:
    """Record the key; for an array, with its first element."""
    if wish.key:
        record = Idempotency(
            user=wish.user, key=wish.key, body_sha256=wish.body_sha256, job_id=first.id, at_s=turn.now.wall_s
        )
        turn.change.put(record)
