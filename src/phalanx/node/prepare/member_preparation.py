"""Prepares one member: checks its devices, creates folders, validates its command, runs its setup, verifies a checkpoint, picks a port.

Runs on a worker thread and may take long on a slow disk; checks `cancelled` between the steps. Returns the result as a value for the logic.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import replace
from typing import Final

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.share import DeviceShare, ShareKind
from phalanx.node.files.job_accounts import (
    acting_as,
    make_owned_folder,
    open_for_writing,
)
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.head_link.head_connection import HeadUnavailable, RequestRejected
from phalanx.node.logic import local_copies
from phalanx.node.logic.events import MemberPrepared, MemberStartFailed
from phalanx.node.logic.local_copies import checkpoints_folder, outputs_folder
from phalanx.node.logic.operator_hooks import HooksInvalid
from phalanx.node.logic.requirements import names_python_by_path
from phalanx.node.logic.step_containers import runs_images
from phalanx.node.logic.variables import environment
from phalanx.node.logic.variables.mpi_variables import colon_hostfile, slots_hostfile
from phalanx.node.logic.warm_start import parse_warm_command
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.scratch import Scratch, scratch_of
from phalanx.node.member.spare_scratch import SpareScratch
from phalanx.node.prepare import (
    container_images,
    data_staging,
    package_install,
    path_probe,
    resume_checkpoint,
    software_environment,
)
from phalanx.node.prepare.command_check import check_program_and_script
from phalanx.node.prepare.member_slices import hold_slices
from phalanx.node.prepare.mps_daemons import MpsUnavailable
from phalanx.node.prepare.node_services import NodeServices
from phalanx.node.prepare.rendezvous_port import free_port
from phalanx.node.prepare.secret_values import fetch_secrets
from phalanx.node.prepare.service_port import reserve_port
from phalanx.node.prepare.setup_runner import SETUP_TASK, run_setup_command
from phalanx.node.probes.devices import DeviceReading
from phalanx.node.probes.preflight_checks import skipped
from phalanx.node.processes.attempt_limits import limits_of_job
from phalanx.node.processes.attempt_processes import (
    ProcessesUnavailable,
    TaskSpec,
)
from phalanx.node.processes.containment import AttemptKey
from phalanx.node.processes.zygote import Zygote
from phalanx.node.transfer import object_checkpoints

_log = logging.getLogger(__name__)
_FREE_SHARE: Final = 0.9  # of a GPU's memory must be free; drivers and a display server hold a little
_FREE_WAIT_S: Final = 10.0  # the memory of a killed rank is freed within a second or two
_POLL_S: Final = 0.2
# After this the ranks start cold, each with the same import: 16 nodes on two cores took 18 s.
_ZYGOTE_WAIT_S: Final = 120.0


def prepare_member(member: MemberRuntime, services: NodeServices) -> MemberPrepared | MemberStartFailed:
    """Prepare the member; see the module."""
    clock_off_s = services.clock_offset_s()
    try:
        _take_account(member, services)
        bad_links = _check_node_and_links(member, services)
        if bad_links:  # the head decides which end is at fault, once both have reported
            return MemberPrepared(key=member.key, bad_links=bad_links, clock_off_s=clock_off_s)
        resume, port, service_port = _prepare(member, services)
    except PreparationFailed as refusal:
        if refusal.note:
            services.note(member, refusal.note)
        use = member.find_memory_overuse() if refusal.charge else None
        said = str(refusal)  # a program's error may quote a secret
        said = said if member.masker is None else member.masker.mask(said.encode()).decode(errors="replace")
        return MemberStartFailed(
            key=member.key,
            why=said if use is None else f"{said}: {use}",
            charge=refusal.charge,
            exit_code=refusal.exit_code,
            flaw=refusal.node_fault,
            disk_full=refusal.disk_full,
        )
    except OSError as error:
        full = services.preflight_checks.full_disk() if error.errno in {errno.ENOSPC, errno.EDQUOT} else ""
        why = f"preparing failed on this node: {error}"
        return MemberStartFailed(key=member.key, why=full or why, charge=False, flaw=bool(full), disk_full=bool(full))
    except Exception as error:  # noqa: BLE001  our bug; unreported, the gang would wait for this node forever
        _log.exception("preparing job %s failed", member.key.job_id)
        return MemberStartFailed(
            key=member.key, why=f"preparing failed on this node: {type(error).__name__}: {error}", charge=False
        )
    return MemberPrepared(key=member.key, port=port, resume=resume, clock_off_s=clock_off_s, service_port=service_port)


def _take_account(member: MemberRuntime, services: NodeServices) -> None:
    """Select the member's account; files of another account's job are in separate folders."""
    account = services.accounts.account_for(member.prepare.user)
    if account is None:
        return
    key, others = member.key, services.accounts.folder
    member.account = account
    member.scratch = scratch_of(services.folder, key.job_id, key.epoch, shared_root=others, account=account)
    member.checkpoints = checkpoints_folder(others, member.prepare)
    member.outputs = outputs_folder(member.scratch.path)
    if member.prepare.spec.upload:
        member.workdir = member.scratch.workdir


def _check_node_and_links(member: MemberRuntime, services: NodeServices) -> tuple[BadLink, ...]:
    """Check this node and the links to its peers; returns the bad links."""
    _unless_cancelled(member)
    _prove_devices(member, services)
    _check_node(member, services)
    _unless_cancelled(member)
    bad_links = services.preflight_checks.bad_links(member.prepare, member.grant)
    for link in bad_links:
        services.note(member, f"link to {link.peer}: {link.why}")
    return bad_links


def _prepare(member: MemberRuntime, services: NodeServices) -> tuple[PublishedCheckpoint | None, int | None, int]:
    """Prepare this node; return the checkpoint to resume from, and on node rank 0 the rendezvous port and a replica's port."""
    steps = (
        _make_folders,
        _run_prolog,
        _bring_files,
        _fetch_secrets,
        _join_mps,
        _make_slices,
        _bring_data,
        _bring_image,
        _bring_software,
        _bring_packages,
        _check_command,
        _open_processes,
        _run_setup,
        _begin_object_store,
    )
    for step in steps:
        _unless_cancelled(member)
        step(member, services)
    resume = resume_checkpoint.select_checkpoint(
        member, services.access, services.checkpoint_uploader, lambda text: services.note(member, text)
    )
    if member.grant.node_rank:
        return resume, None, 0
    terms = member.prepare.spec.service
    if terms is None:
        return resume, free_port(), 0
    reserved = reserve_port(terms.port)
    member.cleanup.callback(reserved.close)
    return resume, free_port(), reserved.number


def _begin_object_store(member: MemberRuntime, services: NodeServices) -> None:
    checkpoints = local_copies.in_object_store(member.prepare)
    outputs = local_copies.outputs_in_object_store(member.prepare)
    if checkpoints or outputs:
        view = services.node_view(member)
        member.store_variables = environment.setup_environment(member.prepare, member.grant, view)
    if checkpoints:
        object_checkpoints.begin(member, lambda text: services.note(member, text))
    if outputs:
        services.output_sync.begin_in_store(member)


def _unless_cancelled(member: MemberRuntime) -> None:
    if member.cancelled.is_set():
        raise PreparationFailed("the job was stopped during preparation", charge=False)


def _prove_devices(member: MemberRuntime, services: NodeServices) -> None:
    """Check that the devices exist and their memory is free."""
    wanted = member.grant.devices
    absent = [index for index in wanted if index >= len(services.devices)]
    if absent:
        why = f"device {absent[0]} is not on this node, which has {len(services.devices)}"
        raise PreparationFailed(why, charge=False, node_fault=True)
    if services.virtual or not wanted or (member.grant.share is not None and member.grant.share.slices):
        return  # a slice has memory of its own, which no other process can hold
    problem, gone = wait_for_free_devices(member, services)
    if problem:  # memory in use belongs to another process, it is not a fault of the node
        raise PreparationFailed(problem, charge=False, node_fault=gone)


def wait_for_free_devices(member: MemberRuntime, services: NodeServices) -> tuple[str, bool]:
    """Wait until the memory of the member's devices is free; return what is wrong after a while, and whether a device does not answer."""
    until_s, wanted = time.monotonic() + _FREE_WAIT_S, member.grant.devices
    while True:
        samples = services.fresh_samples(_FREE_WAIT_S)
        problems = (_device_problem(index, samples.get(index), member.grant.share) for index in wanted)
        problem = next(filter(None, problems), "")
        member.all_devices_answer = len(samples) == len(services.devices)
        if not problem:
            return "", False
        if time.monotonic() >= until_s or member.cancelled.wait(_POLL_S):
            return problem, any(samples.get(index) is None for index in wanted)


def _check_node(member: MemberRuntime, services: NodeServices) -> None:
    """Run the preflight checks: disk, shared memory, matrix products."""
    full = "" if skipped(member.prepare) else services.preflight_checks.full_disk()
    flaw = full or services.preflight_checks.node_fault(member.prepare, member.grant)
    if flaw:
        raise PreparationFailed(flaw, charge=False, node_fault=True, disk_full=bool(full))


def _device_problem(index: int, sample: DeviceReading | None, share: DeviceShare | None) -> str:
    if sample is None:
        return f"GPU {index} does not answer; see nvidia-smi and the kernel log"
    used, total = sample.memory_used_bytes, sample.memory_total_bytes
    wanted = total if share is None else share.memory_bytes
    if used is not None and total is not None and wanted is not None and total - used < _FREE_SHARE * wanted:
        return f"GPU {index} ({sample.uuid}): {used >> 20} of {total >> 20} MiB are in use by other processes; see nvidia-smi"
    return ""


def _run_prolog(member: MemberRuntime, services: NodeServices) -> None:
    """Run the operator's health checks and prologs, before the first process of the job."""
    try:
        services.hooks.before_job(member, services.visible_devices(member), lambda text: services.note(member, text))
    except HooksInvalid as error:
        raise PreparationFailed(str(error), charge=False, node_fault=True) from error


def _make_folders(member: MemberRuntime, services: NodeServices) -> None:
    scratch, order = member.scratch, member.prepare
    texts = _host_texts(member)
    services.spares.make(scratch, texts)
    if member.account is not None and local_copies.has_local_checkpoints(order):
        make_owned_folder(member.checkpoints, member.account)
    resume_checkpoint.check_storage(member, sees=services.sees_head_files())
    with acting_as(member.account):
        for name, text in texts.items():
            path = os.path.join(scratch.path, name)
            if not os.path.exists(path):
                with open(open_for_writing(path), "w", encoding="utf-8") as file:
                    file.write(text)
        for folder in resume_checkpoint.writable_folders(member):
            try:
                resume_checkpoint.make_folder(folder)
            except OSError as error:
                raise PreparationFailed(
                    f"{folder} cannot be created on this node: {error.strerror}", charge=True
                ) from error
        path_probe.create_marker(member)
    resume_checkpoint.download_outputs(member, services.output_sync)
    member.reports = services.spool.open_reports(
        scratch.reports, lambda report: services.on_report(member, report), member.account
    )


def _host_texts(member: MemberRuntime) -> dict[str, str]:
    """The text of each host file, by its name in the scratch folder."""
    scratch, order = member.scratch, member.prepare
    return {
        os.path.basename(scratch.hostfile): slots_hostfile(order),
        os.path.basename(scratch.colon_hostfile): colon_hostfile(order),
    }


def remove_scratch(scratch: Scratch, member: MemberRuntime | None, spares: SpareScratch) -> None:
    """Remove the folder of an attempt that is over, or keep it for another. `member`: one of the attempt; None if it is not known."""
    spares.keep_or_remove(scratch, {} if member is None else _host_texts(member))


def _bring_files(member: MemberRuntime, services: NodeServices) -> None:
    spec = member.prepare.spec
    if spec.upload:
        from phalanx.node.files import workdir_upload  # with readers of archives, for these jobs alone

        try:
            workdir_upload.fetch_and_unpack(
                services.access,
                spec.upload,
                member.scratch.workdir,
                member.cancelled,
                account=member.account,
                archive_path=member.scratch.private("upload.tar"),
            )
        except workdir_upload.UploadInvalid as error:
            raise PreparationFailed(str(error), charge=True) from error
        except (HeadUnavailable, RequestRejected) as error:
            raise PreparationFailed(f"the uploaded working directory did not arrive: {error}", charge=False) from error
    with acting_as(member.account):
        exists = os.path.isdir(member.workdir)
    if not exists:
        raise PreparationFailed(
            f"working directory {member.workdir} does not exist on this node; submit from a folder on a file system that all nodes share, or with --copy",
            charge=True,
        )


def _fetch_secrets(member: MemberRuntime, services: NodeServices) -> None:
    fetch_secrets(member, services.access)


def _join_mps(member: MemberRuntime, services: NodeServices) -> None:
    """Start the MPS daemon of its shared device, if it is the first there."""
    share = member.grant.share
    if share is None or share.kind is not ShareKind.MPS or services.virtual:
        return
    device = services.devices[member.grant.devices[0]].uuid
    try:
        member.mps = member.cleanup.enter_context(services.mps.hold(device, share.group, member.account))
    except MpsUnavailable as error:
        raise PreparationFailed(str(error), charge=not error.installed, node_fault=error.installed) from error


def _make_slices(member: MemberRuntime, services: NodeServices) -> None:
    hold_slices(member, services.slices, services.devices)


def _bring_data(member: MemberRuntime, services: NodeServices) -> None:
    """Stage or mount the datasets, before a container is made that binds them."""
    spec = member.prepare.spec
    if not spec.data:
        return
    if spec.data_mode is DataMode.STAGE:
        _open(member, services)
    data_staging.provide(
        member,
        cache=services.cache_folder(member),
        servers=services.data_servers,
        held=services.held_datasets,
        mounts=services.data_mounts,
        limit=services.base.get(data_staging.LIMIT_VARIABLE, ""),
        variables=environment.setup_environment(member.prepare, member.grant, services.node_view(member)),
        open_output=lambda: services.open_supervisor_output(member),
    )


def _bring_image(member: MemberRuntime, services: NodeServices) -> None:
    """Pull the image if it is not here yet."""
    if runs_images(member.prepare.spec):
        container_images.make_image_cache(services.cache_folder(member), member.account)
    if not member.prepare.spec.image:
        return
    _open(member, services)
    member.container = container_images.prepare_container(
        member,
        cache=services.cache_folder(member),
        base=environment.inheritable_environment(services.base_environment(member)),
        open_output=lambda: services.open_supervisor_output(member),
        gpus=services.image_gpus(member),
    )


def _bring_software(member: MemberRuntime, services: NodeServices) -> None:
    """Look for the environment that the job names, before anything is installed or started in it."""
    if not member.prepare.spec.software.exists:
        return
    _open(member, services)
    view = replace(services.node_view(member), secrets={})  # a module's errors are written to files
    found = software_environment.bring(
        member,
        variables=environment.setup_environment(member.prepare, member.grant, view),
        open_output=lambda: services.open_supervisor_output(member),
    )
    services.note(member, found)
    argv = member.prepare.spec.role.argv
    if member.prepare.spec.software.has_python and names_python_by_path(argv):
        services.note(member, f"{argv[0]} is named by its path and is not the environment's; write `python`")


def _bring_packages(member: MemberRuntime, services: NodeServices) -> None:
    """Install packages before looking up the command: a package may provide it."""
    with acting_as(member.account):
        file = package_install.file_of(member)
    if not file:
        return
    _open(member, services)
    view = replace(services.node_view(member), secrets={})  # an installer's errors are written to files
    variables = environment.setup_environment(member.prepare, member.grant, view)
    package_install.bring(
        member,
        file,
        cache=services.cache_folder(member),
        variables=software_environment.dressed(member, variables),
        open_output=lambda: services.open_supervisor_output(member),
    )
    argv = member.prepare.spec.role.argv
    if member.venv and names_python_by_path(argv):
        services.note(member, f"{argv[0]} is named by its path and does not use the packages of {file}; write `python`")


def _check_command(member: MemberRuntime, services: NodeServices) -> None:
    """Look up the program, and check the script that it would run."""
    role, spec = member.prepare.spec.role, member.prepare.spec
    command: tuple[str, ...] | str = role.script or role.argv
    if not command:
        raise PreparationFailed("the job names no command", charge=True)
    variables = environment.setup_environment(member.prepare, member.grant, services.node_view(member))
    variables = software_environment.dressed(member, variables)
    member.environment = variables
    with acting_as(member.account):
        check_program_and_script(command, member, variables)
    if spec.warm and member.account is not None:
        services.note(
            member,
            "ranks start cold: jobs run under their owner's account here, and a warm parent runs job code under the supervisor's account",
        )
    elif spec.warm and spec.image:
        services.note(member, "ranks start cold: a warm parent runs on the node, not in an image")
    elif spec.warm:
        warm = parse_warm_command(command)
        member.zygote = (
            None
            if warm is None
            else services.zygotes.request(warm, env=_first_environment(member, services), cwd=member.workdir)
        )


def _first_environment(member: MemberRuntime, services: NodeServices) -> dict[str, str]:
    """The environment of the ranks, except for the values that the barrier decides."""
    from phalanx.core.state.commands import StartTasks

    order, key = member.prepare, member.key
    start = StartTasks(
        node_id=member.grant.node_id,
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        port=0,
        resume=None,
    )
    return software_environment.dressed(
        member, environment.rank_environment(order, start, member.grant, 0, services.node_view(member))[0]
    )


def _open_processes(member: MemberRuntime, services: NodeServices) -> None:
    """Open the member's processes; warm if the zygote is ready."""
    zygote = member.zygote
    if zygote is not None and not _zygote_ready(member):
        services.note(member, f"ranks start cold: {zygote.reason or 'the warm parent is not ready'}")
        zygote = None
    if member.processes is None or zygote is not None:
        _open(member, services, zygote)


def _open(member: MemberRuntime, services: NodeServices, zygote: Zygote | None = None) -> None:
    """Open the member's processes, and close those of the installer: warm ranks need a keeper of their own."""
    with member.containment_lock:
        if member.processes is not None:
            member.processes.close()
    key = AttemptKey(
        job_id=member.key.job_id, epoch=member.key.epoch, generation=member.key.generation, node_key=services.node_key
    )
    limits = limits_of_job(
        member.prepare.spec.role_of(member.grant),
        member.grant,
        virtual=services.virtual,
        node_cpus=len(os.sched_getaffinity(0)),
        node_devices=len(services.devices),
    )
    try:
        processes = services.host.open(key, limits=limits, zygote=zygote)
    except ProcessesUnavailable as error:
        if zygote is None:
            raise PreparationFailed(f"cannot start a process on this node: {error}", charge=False) from error
        processes = services.host.open(key, limits=limits)
    with member.containment_lock:
        member.processes = processes
        if member.cancelled.is_set():
            processes.kill()


def _zygote_ready(member: MemberRuntime) -> bool:
    assert member.zygote is not None
    until_s = time.monotonic() + _ZYGOTE_WAIT_S
    while time.monotonic() < until_s and not member.cancelled.is_set():
        if member.zygote.wait(_POLL_S):
            return True
        if member.zygote.reason:
            return False
    return False


def _run_setup(member: MemberRuntime, services: NodeServices) -> None:
    """Run the setup text once per attempt, in the member's containment, and wait for it."""
    text = member.prepare.spec.setup
    marker = member.scratch.private("setup-done")
    if not text or os.path.exists(marker):
        return
    task = TaskSpec(task_id=SETUP_TASK, command=text, cwd=member.workdir, env=member.environment)
    if member.container is not None:
        assert member.processes is not None
        task = member.container.wrap_task(member.processes.key, task)
    code = run_setup_command(
        member, SETUP_TASK, task.command, task.env, lambda: services.open_supervisor_output(member), cwd=task.cwd
    )
    if code != 0:
        raise PreparationFailed(
            f"setup ended with code {code}; its output is in the stream supervisor-{member.grant.node_rank}",
            charge=True,
            exit_code=code,
        )
    with open(marker, "w", encoding="ascii"):
        pass
