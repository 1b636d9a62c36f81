"""Submits: creates a job, or all elements of an array in one step. Everything is validated before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from phalanx.controller.requests import reservations
from phalanx.controller.requests.channels import check_notified
from phalanx.controller.requests.licences import with_known_licences
from phalanx.controller.requests.mig_checks import checked_slices
from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.requests.secrets import check_known_secrets
from phalanx.controller.step_context import StepContext
from phalanx.core.access.membership import belongs, is_open
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle import dependencies
from phalanx.core.lifecycle.dependencies import JobStates
from phalanx.core.scheduling.feasibility.request import feasibility_request
from phalanx.core.state.events import SubmitJob
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import IDEMPOTENCY, PROJECTS, SIGN_IN, USERS, Idempotency
from phalanx.core.work.array import format_indices, parse_array
from phalanx.core.work.dependency import (
    ArrayPosition,
    Dependency,
    DependencyKind,
    array_element_id,
)
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.launchers import find_launcher, single_node_launcher
from phalanx.core.work.services.service_terms import ReplicaPosition
from phalanx.core.work.sign_in import PROVIDER
from phalanx.core.work.spec import JobSpec, LaunchMode
from phalanx.core.work.topology_constraint import fixed_to_one_node
from phalanx.core.work.users import Action, User, UserRole

handlers: Final = RequestHandlers()


def _describe(request: SubmitJob, answer: object) -> str:
    jobs = [job for job in (answer if isinstance(answer, list) else [answer]) if isinstance(job, Job)]
    made = "" if not jobs else f"job {jobs[0].id} " if len(jobs) == 1 else f"jobs {jobs[0].id} to {jobs[-1].id} "
    return f"{made}project {request.project} queue {request.queue} gpus {_amount_text(request.spec)}"


def _amount_text(spec: JobSpec) -> str:
    return " + ".join(role.gpus.amount_text for role in spec.role.each)


@handlers.add(SubmitJob, Action.SUBMIT, audit=_describe)
def submit(context: StepContext, request: SubmitJob) -> Job | list[Job]:
    """Create the job, or the array's elements in order of their index. For a repeated key, return the earlier job or first element.

    Raises:
        PhalanxError: refused; nothing was changed.
    """
    world = context.world
    if request.key:
        earlier = world.table(IDEMPOTENCY).get((request.user, request.key))
        if earlier is not None:
            return _earlier_job(context, request, earlier)
    if request.spec.service is not None:
        raise BadRequest("a service is not a job", hint=Hint(HintCode.SUBMIT_SERVICE))
    request = check_submission(context, request)
    indices = parse_array(request.spec.array).indices if request.spec.array else ()
    parents = _parents(context, request, indices)
    if not indices:
        return _put(context, request, parents)
    return _put_array(context, request, indices, parents)


def check_submission(context: StepContext, request: SubmitJob) -> SubmitJob:
    """Check that the user may submit the spec and that it can ever start; return the request as it shall be carried out.

    Raises:
        PhalanxError: refused.
    """
    queues = context.world.queues
    _check_project(context, request)
    if request.queue not in queues:
        raise NotFound(f"no queue {request.queue!r}", hint=f"there are: {', '.join(sorted(queues))}")
    reservations.check_named(context, request)
    _check_nodes(context, request)
    _check_share(context, request)
    check_known_secrets(context, request.spec, user=request.user, project=request.project)
    check_notified(context, request)
    request = replace(request, spec=resolved_spec(context, request.spec))
    outlook = context.feasibility.check(feasibility_request(request.spec, request.queue, request.user))
    if outlook.never and not request.spec.allow_never:
        raise outlook.error()
    return request


def resolved_spec(context: StepContext, spec: JobSpec) -> JobSpec:
    """The spec as it shall be carried out: MIG slices by the profiles of the fleet, launchers kept on one node, extras that are licences as seats.

    Raises:
        BadRequest: no node has such slices, or the launcher cannot start tasks on several nodes.
    """
    role = checked_slices(spec.role, context.world.nodes.values(), has_steps=bool(spec.slurm))
    if role is not spec.role:
        spec = replace(spec, role=role)
    return with_known_licences(context, _in_one_world(spec))


def put_replica(context: StepContext, request: SubmitJob, replica: ReplicaPosition) -> Job:
    """Create a replica of a service: a job without conditions."""
    seq = context.change.new_job_seq()
    return _put_one(context, request, request.spec, (JobId(str(seq)), seq, None), ((), ""), replica)


def put_end_job(context: StepContext, request: SubmitJob) -> Job:
    """Create a job that runs the `on_end` command of one that has ended (`controller.end_jobs`)."""
    seq = context.change.new_job_seq()
    return _put_one(context, request, request.spec, (JobId(str(seq)), seq, None), ((), ""))


def put_staging_job(context: StepContext, request: SubmitJob, nodes: tuple[NodeId, ...]) -> Job:
    """Create a job that only copies data to these nodes, for jobs that wait (`controller.data_staging`)."""
    seq = context.change.new_job_seq()
    job = _put_one(context, request, request.spec, (JobId(str(seq)), seq, None), ((), ""))
    job = replace(job, staged_on=nodes)
    context.change.put(job)
    return job


# ---- validation -----------------------------------------------------------------------------------------------------


def _check_nodes(context: StepContext, request: SubmitJob) -> None:
    """Check that all nodes of `nodelist` exist, as a name may be mistyped; nodes of `exclude` need not. Nodes that are still to come may be named.

    Raises:
        NotFound: a node does not exist.
    """
    if context.world.awaited_nodes:
        return
    unknown = [name for name in request.spec.nodelist if name not in context.world.nodes]
    if unknown:
        raise NotFound(f"nodelist: no node {unknown[0]}", hint=Hint(HintCode.LIST_NODES))


def _check_share(context: StepContext, request: SubmitJob) -> None:
    """Check that some node could grant a part of a device, or nodes of several kinds to one job.

    Raises:
        BadRequest: the engine of all nodes grants whole devices, in equal parts, only.
    """
    gpus, nodes = request.spec.role.gpus, context.world.nodes.values()
    if request.spec.role.others and nodes and all(node.per_attempt for node in nodes):
        raise BadRequest(
            f"a heterogeneous job: the engine {next(iter(nodes)).engine} gets the nodes of a job as equal parts",
            hint="submit the components one by one",
        )
    if gpus.has_shares and nodes and all(node.per_attempt for node in nodes):
        engine = next(iter(nodes)).engine
        raise BadRequest(
            f"gpus {gpus}: the engine {engine} grants whole GPUs only",
            hint=Hint(HintCode.GIVE_VALUE, key="gpus", value="1"),
        )


def _in_one_world(spec: JobSpec) -> JobSpec:
    """Keep a launcher that cannot start tasks on other nodes on one node, even if the fleet changes before the start."""
    role = spec.role
    launcher = find_launcher(role.argv, role.script)
    in_image = role.launch is LaunchMode.ONCE and bool(spec.image)
    # The folder of a copy has another path on each node, and the launcher starts its tasks in that of the first.
    of_copy = role.launch is LaunchMode.ONCE and bool(spec.upload)
    bound = single_node_launcher(role) is not None or in_image or of_copy
    if not bound or spec.slurm:  # a batch script runs once, whatever it calls
        return spec
    several = next((one for one in role.gpus.choices if (one.nodes or 1) > 1 or one.nodes_max is not None), None)
    if several is not None:
        if of_copy:
            raise BadRequest(
                f"{launcher} cannot start tasks on other nodes in a copy of the working directory: its path differs from node to node",
                hint=Hint(HintCode.SET_WORKDIR_SHARED),
            )
        if in_image:
            raise BadRequest(
                f"{launcher} in an image cannot start tasks on other nodes: our launch agent is not in the image",
                hint=Hint(HintCode.GIVE_VALUE, key="nodes", value="1"),
            )
        raise BadRequest(
            f"{launcher} starts once on each of the {several.nodes} nodes and would create {several.nodes} separate worlds",
            hint=Hint(HintCode.RUN_RANKS),
        )
    return replace(spec, role=replace(role, gpus=fixed_to_one_node(role.gpus)))


def _earlier_job(context: StepContext, request: SubmitJob, earlier: Idempotency) -> Job | list[Job]:
    if earlier.body_sha256 != request.body_sha256:
        raise Conflict(
            f"idempotency key {request.key!r} was used for another job ({earlier.job_id})", hint="use a new key"
        )
    job = context.world.jobs.get(earlier.job_id)
    if job is None:
        raise Conflict(
            f"job {earlier.job_id} was created with this key and ended long ago",
            hint=Hint(HintCode.SHOW_JOB, job=earlier.job_id),
        )
    return job if job.array is None else [job]


def _check_project(context: StepContext, request: SubmitJob) -> None:
    projects = context.world.table(PROJECTS)
    project = projects.get(request.project)
    if project is None:
        raise NotFound(f"no project {request.project!r}", hint=f"there are: {', '.join(sorted(projects))}")
    user = context.world.table(USERS).get(request.user) or User(id=request.user, role=UserRole.USER)
    settings = context.world.table(SIGN_IN).get(PROVIDER)
    may_submit = is_open(project, settings) or belongs(project, user.id, user)
    if not may_submit and user.role not in (UserRole.OPERATOR, UserRole.ADMIN):
        raise NotPermitted(
            f"{request.user} is not a member of project {project.id}", hint="ask one of its admins to add you"
        )


def _parents(context: StepContext, request: SubmitJob, indices: Sequence[int]) -> dict[JobId, JobStates]:
    """States of each job or array that the submit depends on, by the id used; for `aftercorr`, by each element's id.

    Raises:
        NotFound: no such job.
        BadRequest: `aftercorr` names a job that is not an array, or an array without these elements.
    """
    found: dict[JobId, JobStates] = {}
    for one in request.spec.dependencies:
        if one.kind is DependencyKind.SINGLETON:
            continue
        states = dependencies.parent_states(context.world, one.job_id, request.parents.get(one.job_id))
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


def _put(context: StepContext, request: SubmitJob, parents: Mapping[JobId, JobStates]) -> Job:
    # The components of a heterogeneous job have numbers of their own. The last is the job's seq, so that a restart does not give it away.
    number, *others = [context.change.new_job_seq() for _ in request.spec.role.each]
    seq = others[-1] if others else number
    unmet, never = dependencies.unmet_of(
        context.world, (request.user, request.spec.name), request.spec.dependencies, parents
    )
    job = _put_one(context, request, request.spec, (JobId(str(number)), seq, None), (unmet, never))
    _remember_key(context, request, job)
    return job


def _put_array(
    context: StepContext, request: SubmitJob, indices: Sequence[int], parents: Mapping[JobId, JobStates]
) -> list[Job]:
    """Create one job for each element. All share one spec; `Job.array` holds the element's index, so that equal jobs stay equal."""
    seqs = [context.change.new_job_seq() for _ in indices]
    array_id, name = JobId(str(seqs[0])), (request.user, request.spec.name)
    spec = _of_one_element(request.spec)
    paired = [one for one in spec.dependencies if one.kind is DependencyKind.AFTER_CORR]
    common = tuple(one for one in spec.dependencies if one not in paired)
    shared, never = dependencies.unmet_of(context.world, name, common, parents)
    jobs: list[Job] = []
    for index, seq in zip(indices, seqs, strict=True):
        place = ArrayPosition(
            array_id=array_id,
            index=index,
            size=len(indices),
            running_max=request.spec.array_max,
            lowest=indices[0],
            highest=indices[-1],
        )
        own = [Dependency(kind=one.kind, job_id=array_element_id(one.job_id, index)) for one in paired]
        more, alone = dependencies.unmet_of(context.world, name, own, parents) if own else ((), "")
        unmet = (*shared, *more) if more else shared
        jobs.append(
            _put_one(context, request, spec, (array_element_id(array_id, index), seq, place), (unmet, never or alone))
        )
    _remember_key(context, request, jobs[0])
    return jobs


def _of_one_element(spec: JobSpec) -> JobSpec:
    return replace(spec, array="", array_max=None)


def _put_one(
    context: StepContext,
    request: SubmitJob,
    spec: JobSpec,
    place: tuple[JobId, int, ArrayPosition | None],
    waits: tuple[tuple[Dependency, ...], str],
    replica: ReplicaPosition | None = None,
) -> Job:
    """Create one job. `place`: its id, seq and element; `waits`: its unmet conditions, and why one can never hold."""
    (job_id, seq, array), (unmet, never) = place, waits
    reason, detail = dependencies.first_reason(
        held=spec.hold, unmet=unmet, begin_s=spec.begin_s, now_s=context.now.wall_s
    )
    job = Job(
        id=job_id,
        folder=f"{job_id}-{context.settings.storage_key}",
        seq=seq,
        spec=spec,
        user=request.user,
        project=request.project,
        queue=request.queue,
        submit_s=context.now.wall_s,
        held=spec.hold,
        reason=reason,
        detail=detail,
        array=array,
        replica=replica,
        unmet_dependencies=unmet,
    )
    context.change.put(job)
    share = spec.role.gpus.share
    unit = "GPUs" if share is None or not share.profile else "MIG slices"
    text = f"submitted by {request.user} for {request.project}: {_amount_text(spec)} {unit}" + (
        f"; {detail}" if unmet else ""
    )
    context.change.add_history(
        HistoryLine(seq=0, at_s=context.now.wall_s, kind="submitted", text=text, job_id=job.id, by=request.user)
    )
    if never:
        context.apply(dependencies.cancel_unmeetable(job, never, context.facts))
        return context.world.jobs[job_id]
    return job


def _remember_key(context: StepContext, request: SubmitJob, first: Job) -> None:
    """Record the key; for an array, with its first element."""
    if request.key:
        record = Idempotency(
            user=request.user,
            key=request.key,
            body_sha256=request.body_sha256,
            job_id=first.id,
            at_s=context.now.wall_s,
        )
        context.change.put(record)
