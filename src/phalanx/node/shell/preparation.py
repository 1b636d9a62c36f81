"""Prepare one member: prove its devices, make its folders, see that its command can run, run its setup, verify a checkpoint, pick a port.

Runs on a hand and may take as long as the disk does; looks at `cancelled` between the steps. The answer is a value for the logic.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.work.job import Resume
from phalanx.node.logic import environment, kept, preflight
from phalanx.node.logic.accounts import login_environment
from phalanx.node.logic.environment import Folders, NodeView
from phalanx.node.logic.happenings import Prepared, Unfit
from phalanx.node.logic.kept import checkpoints_of, outputs_of
from phalanx.node.logic.legible import legible
from phalanx.node.logic.requirements import passes_by
from phalanx.node.logic.warm import warm_argv
from phalanx.node.shell import images, reach, requirements, resuming, uploads
from phalanx.node.shell.accounts import ONE_ACCOUNT, JobAccounts, acting_as, open_to_write, owned_folder
from phalanx.node.shell.aside import SETUP_TASK, run_aside
from phalanx.node.shell.containment import AttemptKey
from phalanx.node.shell.fitness import Fitness
from phalanx.node.shell.link import HeadAccess, HeadAway, Rejected
from phalanx.node.shell.outputs import Outputs
from phalanx.node.shell.porter import Porter
from phalanx.node.shell.present import Present
from phalanx.node.shell.probes import DeviceFacts, DeviceSample
from phalanx.node.shell.processes import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    ProcessesUnavailable,
    ProcessHost,
    TaskSpec,
)
from phalanx.node.shell.refusal import Refusal
from phalanx.node.shell.rendezvous_port import free_port
from phalanx.node.shell.reports import RankReport
from phalanx.node.shell.scratch import scratch_of
from phalanx.node.shell.shipping import Shipper, StreamName
from phalanx.node.shell.spool import Spool
from phalanx.node.shell.zygote import Zygote, Zygotes
from phalanx.wire.manifest import open_regular

_log = logging.getLogger(__name__)
_FREE_SHARE: Final = 0.9  # of a GPU's memory must be free; drivers and a display server hold a little
_FREE_WAIT_S: Final = 10.0  # memory of a rank just killed comes back within a second or two
_FREE_LOOK_S: Final = 0.2
# Past that the ranks start cold, each with the same import: 16 nodes on two cores were seen to take 18 s.
_ZYGOTE_WAIT_S: Final = 120.0
# One script at a time on a node: each may take 60 MiB and hold up every other thread.
_judging: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What preparing and starting work with.

    Attributes:
        devices: the node's inventory.
        fresh: device samples taken after the call, by index.
        heard: what a rank of a member reported.
        sees: whether the head's folders lie here too; None where the head cannot say.
        cache: folder of what attempts share on this node.
        fitness: what proves the node itself.
        clock_off_s: how far our wall clock is ahead of the head's.
        accounts: whose account a job runs under; `folder` is the node's, for what is ours.
    """

    node_key: str
    access: HeadAccess
    base: Mapping[str, str]
    virtual: bool
    devices: tuple[DeviceFacts, ...]
    fresh: Callable[[float], Mapping[int, DeviceSample]]
    host: ProcessHost
    zygotes: Zygotes
    spool: Spool
    shipper: Shipper
    heard: Callable[[Present, RankReport], None]
    porter: Porter
    outputs: Outputs
    sees: Callable[[], bool | None]
    cache: str
    fitness: Fitness
    clock_off_s: Callable[[], float]
    folder: str = ""
    accounts: JobAccounts = ONE_ACCOUNT

    def view(self, present: Present) -> NodeView:
        """This node, as the member's environment shows it."""
        scratch = present.scratch
        return NodeView(
            base={} if present.inside is not None else self.base_of(present),
            devices=tuple(self.devices[index].uuid for index in present.grant.devices),
            virtual=self.virtual,
            folders=Folders(
                hostfile=scratch.hostfile,
                page=scratch.page,
                reports=scratch.reports,
                checkpoints=present.checkpoints,
                outputs=present.outputs,
                stacks=scratch.path,
            ),
        )

    def base_of(self, present: Present) -> Mapping[str, str]:
        """The environment that its processes begin with: the supervisor's own, or that of a login of its account."""
        return self.base if present.account is None else login_environment(self.base, present.account)

    def cache_of(self, present: Present) -> str:
        """The folder of what attempts share: one for each account, for whoever can write there decides what the others run."""
        if present.account is None:
            return self.cache
        folder = os.path.join(self.accounts.folder, "cache", str(present.account.uid))
        owned_folder(folder, present.account)
        return folder

    def pipe(self, present: Present, stream: str) -> int:
        """A new descriptor, to be closed, of what a task prints into a stream."""
        return self.spool.open_pipe(stream, None if present.account is None else present.account.uid)

    def stream(self, present: Present, stream: str) -> str:
        """The spool's key of one of the member's streams, begun if need be."""
        name = StreamName(present.key.job_id, present.key.epoch, stream)
        self.spool.add(name.key, present.scratch.log(stream))
        self.shipper.add(name)
        return name.key

    def output(self, present: Present) -> int:
        """A new descriptor, to be closed, of what goes into the supervisor's stream of the member."""
        return self.pipe(present, self.stream(present, f"supervisor-{present.grant.node_rank}"))

    def note(self, present: Present, text: str) -> None:
        """A line of the supervisor's own to the job's log."""
        with contextlib.suppress(OSError, KeyError):  # its scratch folder may be gone already
            key = self.stream(present, f"supervisor-{present.grant.node_rank}")
            self.spool.write(key, f"phalanx: {legible(text)}\n".encode())


def prepare(present: Present, shop: Workshop) -> Prepared | Unfit:
    """See the module."""
    clock_off_s = shop.clock_off_s()
    try:
        _take_account(present, shop)
        bad_links = _prove(present, shop)
        if bad_links:  # the head judges which end is at fault, once it has heard both
            return Prepared(key=present.key, bad_links=bad_links, clock_off_s=clock_off_s)
        resume, port = _prepare(present, shop)
    except Refusal as refusal:
        return Unfit(
            key=present.key, why=str(refusal), charge=refusal.charge, exit_code=refusal.exit_code, flaw=refusal.flaw
        )
    except OSError as error:
        return Unfit(key=present.key, why=f"preparing failed on this node: {error}", charge=False)
    except Exception as error:  # noqa: BLE001  ours to mend; but unsaid, the gang would wait for this node for ever
        _log.exception("preparing job %s failed", present.key.job_id)
        return Unfit(
            key=present.key, why=f"preparing failed on this node: {type(error).__name__}: {error}", charge=False
        )
    return Prepared(key=present.key, port=port, resume=resume, clock_off_s=clock_off_s)


def _take_account(present: Present, shop: Workshop) -> None:
    """Find whose account it runs under; what is another account's lies apart from what is ours."""
    account = shop.accounts.of(present.prepare.user)
    if account is None:
        return
    key, others = present.key, shop.accounts.folder
    present.account = account
    present.scratch = scratch_of(shop.folder, key.job_id, key.epoch, others=others, account=account)
    present.checkpoints = checkpoints_of(others, key.job_id)
    present.outputs = outputs_of(present.scratch.path)
    if present.prepare.spec.upload:
        present.workdir = present.scratch.workdir


def _prove(present: Present, shop: Workshop) -> tuple[BadLink, ...]:
    """Prove this node, and the links to its peers: what of these is bad."""
    _unless_cancelled(present)
    _prove_devices(present, shop)
    _prove_node(present, shop)
    _unless_cancelled(present)
    bad_links = shop.fitness.bad_links(present.prepare, present.grant)
    for link in bad_links:
        shop.note(present, f"link to {link.peer}: {link.why}")
    return bad_links


def _prepare(present: Present, shop: Workshop) -> tuple[Resume | None, int | None]:
    steps = (_make_folders, _bring_files, _bring_image, _bring_packages, _check_command, _open_processes, _run_setup)
    for step in steps:
        _unless_cancelled(present)
        step(present, shop)
    resume = resuming.find(present, shop.access, shop.porter, lambda text: shop.note(present, text))
    return resume, free_port() if present.grant.node_rank == 0 else None


def _unless_cancelled(present: Present) -> None:
    if present.cancelled.is_set():
        raise Refusal("stopped while it was being prepared", charge=False)


def _prove_devices(present: Present, shop: Workshop) -> None:
    """The devices are there and their memory is free."""
    wanted = present.grant.devices
    absent = [index for index in wanted if index >= len(shop.devices)]
    if absent:
        why = f"device {absent[0]} is not on this node, which has {len(shop.devices)}"
        raise Refusal(why, charge=False, flaw=True)
    if shop.virtual or not wanted:
        return
    until_s = time.monotonic() + _FREE_WAIT_S
    while True:
        samples = shop.fresh(_FREE_WAIT_S)
        trouble = next((text for index in wanted if (text := _trouble(index, samples.get(index)))), "")
        if not trouble:
            return
        if time.monotonic() >= until_s or present.cancelled.wait(_FREE_LOOK_S):
            gone = any(samples.get(index) is None for index in wanted)  # memory in use is somebody's work, not a flaw
            raise Refusal(trouble, charge=False, flaw=gone)


def _prove_node(present: Present, shop: Workshop) -> None:
    """Disk, shared memory and matrix products."""
    flaw = shop.fitness.flaw(present.prepare, present.grant)
    if flaw:
        raise Refusal(flaw, charge=False, flaw=True)


def _trouble(index: int, sample: DeviceSample | None) -> str:
    if sample is None:
        return f"GPU {index} does not answer; see nvidia-smi and the kernel's log"
    used, total = sample.memory_used_bytes, sample.memory_total_bytes
    if used is not None and total is not None and total - used < _FREE_SHARE * total:
        return f"GPU {index} ({sample.uuid}): {used >> 20} of {total >> 20} MiB are in use by somebody else; see nvidia-smi"
    return ""


def _make_folders(present: Present, shop: Workshop) -> None:
    scratch, order = present.scratch, present.prepare
    scratch.make()
    if present.account is not None and kept.keeps_checkpoints(order):
        owned_folder(present.checkpoints, present.account)
    resuming.check_storage(present, sees=shop.sees())
    with acting_as(present.account):
        if not os.path.exists(scratch.hostfile):
            with open(open_to_write(scratch.hostfile), "w", encoding="utf-8") as file:
                file.write(environment.hostfile(order))
        for folder in resuming.folders_of(present):
            try:
                resuming.make_folder(folder)
            except OSError as error:
                raise Refusal(f"{folder} cannot be made on this node: {error.strerror}", charge=True) from error
        reach.leave_mark(present)
    resuming.bring_outputs(present, shop.outputs)
    present.reports = shop.spool.open_reports(
        scratch.reports, lambda report: shop.heard(present, report), present.account
    )


def _bring_files(present: Present, shop: Workshop) -> None:
    spec = present.prepare.spec
    if spec.upload:
        try:
            uploads.fetch_and_unpack(
                shop.access,
                spec.upload,
                present.scratch.workdir,
                present.cancelled,
                account=present.account,
                packed=present.scratch.private("upload.tar"),
            )
        except uploads.UploadInvalid as error:
            raise Refusal(str(error), charge=True) from error
        except (HeadAway, Rejected) as error:
            raise Refusal(f"the uploaded working directory did not arrive: {error}", charge=False) from error
    with acting_as(present.account):
        there = os.path.isdir(present.workdir)
    if not there:
        raise Refusal(
            f"working directory {present.workdir} is not on this node; submit from a folder that every node sees, or with --copy",
            charge=True,
        )


def _bring_image(present: Present, shop: Workshop) -> None:
    """Pull it where it is not here yet."""
    if not present.prepare.spec.image:
        return
    _open(present, shop)
    present.inside = images.bring(
        present,
        cache=shop.cache_of(present),
        base=environment.inherited(shop.base_of(present)),
        open_output=lambda: shop.output(present),
        gpus=() if shop.virtual else tuple(shop.devices[index].uuid for index in present.grant.devices),
    )


def _bring_packages(present: Present, shop: Workshop) -> None:
    """Before the command is looked for: it may be one that a package brings."""
    with acting_as(present.account):
        file = requirements.file_of(present)
    if not file:
        return
    _open(present, shop)
    variables = environment.setup_environment(present.prepare, present.grant, shop.view(present))
    requirements.bring(
        present, file, cache=shop.cache_of(present), variables=variables, open_output=lambda: shop.output(present)
    )
    argv = present.prepare.spec.role.argv
    if present.venv and passes_by(argv):
        shop.note(present, f"{argv[0]} is named by its path and does not see the packages of {file}; write `python`")


def _check_command(present: Present, shop: Workshop) -> None:
    """Find what would be exec'd, and read the script it would read."""
    role, spec = present.prepare.spec.role, present.prepare.spec
    command: tuple[str, ...] | str = role.script or role.argv
    if not command:
        raise Refusal("the job names no command", charge=True)
    variables = environment.setup_environment(present.prepare, present.grant, shop.view(present))
    variables = requirements.dressed(present, variables)
    present.environment = variables
    with acting_as(present.account):
        _look_at(command, present, variables)
    if spec.warm and present.account is not None:
        shop.note(
            present,
            "ranks start cold: jobs run as the account of their owner here, and a warm parent runs job code as ours",
        )
    elif spec.warm and spec.image:
        shop.note(present, "ranks start cold: a warm parent runs on the node, not in an image")
    elif spec.warm:
        warm = warm_argv(command)
        present.zygote = (
            None
            if warm is None
            else shop.zygotes.request(warm, env=_first_environment(present, shop), cwd=present.workdir)
        )


def _look_at(command: tuple[str, ...] | str, present: Present, variables: Mapping[str, str]) -> None:
    spec = present.prepare.spec
    if not isinstance(command, str):
        # Else setup may make what is missing, or the image hold it; exec tells.
        known = not spec.setup and not spec.image
        if known:
            _resolve(command[0], present.workdir, variables)
        _judge_script(preflight.script_of(command), present, must_exist=known)
    elif "\n" not in command.strip():
        with contextlib.suppress(ValueError):
            _judge_script(preflight.script_of(shlex.split(command)), present, must_exist=False)


def _first_environment(present: Present, shop: Workshop) -> dict[str, str]:
    """The environment that the ranks will have, but for what the barrier decides."""
    from phalanx.core.state.commands import StartTasks

    order, key = present.prepare, present.key
    start = StartTasks(
        node_id=present.grant.node_id,
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        port=0,
        resume=None,
    )
    return requirements.dressed(
        present, environment.rank_environment(order, start, present.grant, 0, shop.view(present))[0]
    )


def _resolve(program: str, workdir: str, variables: Mapping[str, str]) -> None:
    if "/" in program:
        path: str | None = os.path.join(workdir, program)
        if not os.path.exists(path or ""):
            raise Refusal(f"{program}: no such file in {workdir}", charge=True, exit_code=NOT_FOUND)
        if os.path.isdir(path or "") or not os.access(path or "", os.X_OK):
            raise Refusal(
                f"{program}: is not executable; chmod +x it, or name its interpreter",
                charge=True,
                exit_code=NOT_EXECUTABLE,
            )
        return
    folders = variables.get("PATH", os.defpath)
    path = shutil.which(
        program, path=os.pathsep.join(os.path.join(workdir, part) for part in folders.split(os.pathsep))
    )
    if path is None:
        raise Refusal(f"{program}: command not found; looked along PATH={folders}", charge=True, exit_code=NOT_FOUND)


def _judge_script(script: str | None, present: Present, *, must_exist: bool) -> None:
    if script is None:
        return
    path = os.path.join(present.workdir, script)
    if not os.path.exists(path):
        if must_exist:
            raise Refusal(f"{script}: no such file in {present.workdir}", charge=True)
        return
    if not path.endswith(".py") or not os.path.isfile(path):
        return
    with open_regular(path) as file:  # its owner may exchange it at any time, for a pipe too
        text = file.read(preflight.SCRIPT_BYTES_MAX + 1)
    allocation = present.prepare.allocation
    around = preflight.Surroundings(
        nodes=len(allocation.grants),
        world_size=max(allocation.world_size, allocation.gpus),
        cuda=bool(present.grant.devices) and present.environment["PHALANX_VIRTUAL"] != "1",
    )
    with _judging:
        why = preflight.objection(script, text, around)
    if why is not None:
        raise Refusal(why, charge=True)


def _open_processes(present: Present, shop: Workshop) -> None:
    """Make room for its processes; warm where the zygote is ready."""
    zygote = present.zygote
    if zygote is not None and not _zygote_ready(present):
        shop.note(present, f"ranks start cold: {zygote.reason or 'the warm parent is not ready'}")
        zygote = None
    if present.processes is None or zygote is not None:
        _open(present, shop, zygote)


def _open(present: Present, shop: Workshop, zygote: Zygote | None = None) -> None:
    """Room for its processes, in the place of what was open for the installer: warm ranks have a keeper of their own."""
    with present.containing:
        if present.processes is not None:
            present.processes.close()
    key = AttemptKey(
        job_id=present.key.job_id, epoch=present.key.epoch, generation=present.key.generation, node_key=shop.node_key
    )
    try:
        processes = shop.host.open(key, zygote=zygote)
    except ProcessesUnavailable as error:
        if zygote is None:
            raise Refusal(f"no process can be started on this node: {error}", charge=False) from error
        processes = shop.host.open(key)
    with present.containing:
        present.processes = processes
        if present.cancelled.is_set():
            processes.kill()


def _zygote_ready(present: Present) -> bool:
    assert present.zygote is not None
    until_s = time.monotonic() + _ZYGOTE_WAIT_S
    while time.monotonic() < until_s and not present.cancelled.is_set():
        if present.zygote.wait(_FREE_LOOK_S):
            return True
        if present.zygote.reason:
            return False
    return False


def _run_setup(present: Present, shop: Workshop) -> None:
    """Run the setup text once for an attempt, in the members' containment, and wait for its end."""
    text = present.prepare.spec.setup
    marker = present.scratch.private("setup-done")
    if not text or os.path.exists(marker):
        return
    task = TaskSpec(task_id=SETUP_TASK, command=text, cwd=present.workdir, env=present.environment)
    if present.inside is not None:
        assert present.processes is not None
        task = present.inside.task(present.processes.key, task)
    code = run_aside(present, SETUP_TASK, task.command, task.env, lambda: shop.output(present), cwd=task.cwd)
    if code != 0:
        raise Refusal(
            f"setup ended with code {code}; its output is in the stream supervisor-{present.grant.node_rank}",
            charge=True,
            exit_code=code,
        )
    with open(marker, "w", encoding="ascii"):
        pass
