"""Prepare one member: prove its devices, make its folders, see that its command can run, run its setup, verify a checkpoint, pick a port.

Runs on a hand and may take as long as the disk does; looks at `cancelled` between the steps. The answer is a value for the logic.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.job import Resume
from phalanx.node.logic import environment, preflight
from phalanx.node.logic.environment import Folders, NodeView
from phalanx.node.logic.happenings import Prepared, Unfit
from phalanx.node.logic.warm import warm_argv
from phalanx.node.shell import checkpoints, uploads
from phalanx.node.shell.containment import AttemptKey
from phalanx.node.shell.link import HeadAccess, HeadAway, Rejected
from phalanx.node.shell.present import Present
from phalanx.node.shell.probes import DeviceFacts, DeviceSample
from phalanx.node.shell.processes import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    ProcessesUnavailable,
    ProcessHost,
    TaskNotStarted,
    TaskSpec,
)
from phalanx.node.shell.reports import RankReport
from phalanx.node.shell.shipping import Shipper, StreamName
from phalanx.node.shell.spool import Spool
from phalanx.node.shell.zygote import Zygotes

SETUP_TASK: Final = "setup"
PORT_FIRST: Final = (
    20_000  # below Linux' ephemeral range (32768 on), so that no outgoing connection takes it in between
)
PORT_LAST: Final = 31_999
_PORT_TRIES: Final = 200
_FOLDER_TRIES: Final = 3
_FREE_SHARE: Final = 0.9  # of a GPU's memory must be free; drivers and a display server hold a little
_FREE_WAIT_S: Final = 10.0  # memory of a rank just killed comes back within a second or two
_FREE_LOOK_S: Final = 0.2
_ZYGOTE_WAIT_S: Final = 30.0  # longer than any import of torch from warm pages; past that the ranks start cold


class _Refusal(Exception):
    """Not here, and why. `charge`: the job's own fault, elsewhere it would fail alike; `exit_code`: what a shell would say of it."""

    def __init__(self, why: str, *, charge: bool, exit_code: int = 1) -> None:
        super().__init__(why)
        self.charge = charge
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What preparing and starting work with.

    Attributes:
        devices: the node's inventory.
        fresh: device samples taken after the call, by index.
        heard: what a rank of a member reported.
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

    def view(self, present: Present) -> NodeView:
        """This node, as the member's environment shows it."""
        scratch = present.scratch
        return NodeView(
            base=self.base, devices=tuple(self.devices[index].uuid for index in present.grant.devices), virtual=self.virtual,
            folders=Folders(hostfile=scratch.hostfile, page=scratch.page, reports=scratch.reports),
        )  # fmt: skip

    def stream(self, present: Present, stream: str) -> str:
        """The spool's key of one of the member's streams, begun if need be."""
        name = StreamName(present.key.job_id, present.key.epoch, stream)
        self.spool.add(name.key, present.scratch.log(stream))
        self.shipper.add(name)
        return name.key

    def note(self, present: Present, text: str) -> None:
        """A line of the supervisor's own to the job's log."""
        with contextlib.suppress(OSError, KeyError):  # its scratch folder may be gone already
            key = self.stream(present, f"supervisor-{present.grant.node_rank}")
            self.spool.write(key, f"phalanx: {text}\n".encode())


def prepare(present: Present, shop: Workshop) -> Prepared | Unfit:
    """See the module."""
    try:
        resume, port = _prepare(present, shop)
    except _Refusal as refusal:
        return Unfit(key=present.key, why=str(refusal), charge=refusal.charge, exit_code=refusal.exit_code)
    except OSError as error:
        return Unfit(key=present.key, why=f"preparing failed on this node: {error}", charge=False)
    return Prepared(key=present.key, port=port, resume=resume)


def _prepare(present: Present, shop: Workshop) -> tuple[Resume | None, int | None]:
    steps = (_prove_devices, _make_folders, _bring_files, _check_command, _open_processes, _run_setup)
    for step in steps:
        _unless_cancelled(present)
        step(present, shop)
    if present.grant.node_rank != 0:
        return None, None
    resume = checkpoints.newest_valid(
        present.prepare.candidates, lambda text: shop.note(present, text), present.cancelled.is_set
    )
    return resume, _free_port()


def _unless_cancelled(present: Present) -> None:
    if present.cancelled.is_set():
        raise _Refusal("stopped while it was being prepared", charge=False)


def _prove_devices(present: Present, shop: Workshop) -> None:
    """The devices are there and their memory is free."""
    wanted = present.grant.devices
    absent = [index for index in wanted if index >= len(shop.devices)]
    if absent:
        raise _Refusal(f"device {absent[0]} is not on this node, which has {len(shop.devices)}", charge=False)
    if shop.virtual or not wanted:
        return
    until_s = time.monotonic() + _FREE_WAIT_S
    while True:
        samples = shop.fresh(_FREE_WAIT_S)
        trouble = next((text for index in wanted if (text := _trouble(index, samples.get(index)))), "")
        if not trouble:
            return
        if time.monotonic() >= until_s or present.cancelled.wait(_FREE_LOOK_S):
            raise _Refusal(trouble, charge=False)


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
    if not os.path.exists(scratch.hostfile):
        with open(scratch.hostfile, "w", encoding="utf-8") as file:
            file.write(environment.hostfile(order))
    for folder in (order.output_dir, order.checkpoint_dir):
        if folder and "://" not in folder:
            try:
                _make_folder(folder)
            except OSError as error:
                raise _Refusal(f"{folder} cannot be made on this node: {error.strerror}", charge=True) from error
    present.reports = shop.spool.open_reports(scratch.reports, lambda report: shop.heard(present, report))


def _make_folder(folder: str) -> None:
    """Also while somebody tidies away the job's empty folder of an earlier attempt (`checkpoints.tidy`)."""
    for _ in range(_FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            os.makedirs(folder, exist_ok=True)
            return
    os.makedirs(folder, exist_ok=True)


def _bring_files(present: Present, shop: Workshop) -> None:
    spec = present.prepare.spec
    if spec.upload:
        try:
            uploads.fetch_and_unpack(shop.access, spec.upload, present.scratch.workdir, present.cancelled)
        except uploads.UploadInvalid as error:
            raise _Refusal(str(error), charge=True) from error
        except (HeadAway, Rejected) as error:
            raise _Refusal(f"the uploaded working directory did not arrive: {error}", charge=False) from error
    if not os.path.isdir(present.workdir):
        raise _Refusal(
            f"working directory {present.workdir} is not on this node; submit from a folder that every node sees, or with --copy",
            charge=True,
        )


def _check_command(present: Present, shop: Workshop) -> None:
    """Find what would be exec'd, and read the script it would read."""
    role, spec = present.prepare.spec.role, present.prepare.spec
    if spec.image:
        raise _Refusal(f"image {spec.image!r}: this node runs no containers yet; submit without image", charge=True)
    command: tuple[str, ...] | str = role.script or role.argv
    if not command:
        raise _Refusal("the job names no command", charge=True)
    variables = environment.setup_environment(present.prepare, present.grant, shop.view(present))
    present.environment = variables
    if not isinstance(command, str):
        if not spec.setup:  # setup may yet make what is missing; then exec tells
            _resolve(command[0], present.workdir, variables)
        _judge_script(preflight.script_of(command), present, must_exist=not spec.setup)
    elif "\n" not in command.strip():
        with contextlib.suppress(ValueError):
            _judge_script(preflight.script_of(shlex.split(command)), present, must_exist=False)
    if spec.warm:
        warm = warm_argv(command)
        present.zygote = (
            None
            if warm is None
            else shop.zygotes.request(warm, env=_first_environment(present, shop), cwd=present.workdir)
        )


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
    return environment.rank_environment(order, start, present.grant, 0, shop.view(present))[0]


def _resolve(program: str, workdir: str, variables: Mapping[str, str]) -> None:
    if "/" in program:
        path: str | None = os.path.join(workdir, program)
        if not os.path.exists(path or ""):
            raise _Refusal(f"{program}: no such file in {workdir}", charge=True, exit_code=NOT_FOUND)
        if os.path.isdir(path or "") or not os.access(path or "", os.X_OK):
            raise _Refusal(
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
        raise _Refusal(f"{program}: command not found; looked along PATH={folders}", charge=True, exit_code=NOT_FOUND)


def _judge_script(script: str | None, present: Present, *, must_exist: bool) -> None:
    if script is None:
        return
    path = os.path.join(present.workdir, script)
    if not os.path.exists(path):
        if must_exist:
            raise _Refusal(f"{script}: no such file in {present.workdir}", charge=True)
        return
    if not path.endswith(".py") or not os.path.isfile(path) or os.path.getsize(path) > preflight.SCRIPT_BYTES_MAX:
        return
    with open(path, "rb") as file:
        text = file.read()
    allocation = present.prepare.allocation
    around = preflight.Surroundings(
        nodes=len(allocation.grants), world_size=max(allocation.world_size, allocation.gpus),
        cuda=bool(present.grant.devices) and present.environment["PHALANX_VIRTUAL"] != "1",
    )  # fmt: skip
    why = preflight.objection(script, text, around)
    if why is not None:
        raise _Refusal(why, charge=True)


def _open_processes(present: Present, shop: Workshop) -> None:
    """Make room for its processes; warm where the zygote is ready."""
    zygote = present.zygote
    if zygote is not None and not _zygote_ready(present):
        shop.note(present, f"ranks start cold: {zygote.reason or 'the warm parent is not ready'}")
        zygote = None
    key = AttemptKey(
        job_id=present.key.job_id, epoch=present.key.epoch, generation=present.key.generation, node_key=shop.node_key
    )
    try:
        processes = shop.host.open(key, zygote=zygote)
    except ProcessesUnavailable as error:
        if zygote is None:
            raise _Refusal(f"no process can be started on this node: {error}", charge=False) from error
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
    marker = os.path.join(present.scratch.path, "setup-done")
    if not text or os.path.exists(marker):
        return
    assert present.processes is not None
    key = shop.stream(present, f"supervisor-{present.grant.node_rank}")
    output = shop.spool.open_pipe(key)
    present.running.wait()
    try:
        task = TaskSpec(task_id=SETUP_TASK, command=text, cwd=present.workdir, env=present.environment)
        with present.containing:  # a freeze comes before or after, never while it is being started
            present.processes.spawn(task, output)
    except TaskNotStarted as error:
        raise _Refusal(f"setup: {error}", charge=error.user_error, exit_code=error.exit_code) from error
    finally:
        os.close(output)
    present.setup_done.wait()
    _unless_cancelled(present)
    if present.setup_code != 0:
        raise _Refusal(
            f"setup ended with code {present.setup_code}; its output is in the stream supervisor-{present.grant.node_rank}",
            charge=True,
            exit_code=present.setup_code,
        )
    with open(marker, "w", encoding="ascii"):
        pass


def _free_port() -> int:
    """A port that nobody listens on now. Somebody may be faster than rank 0: then the gang tries again, uncharged."""
    for _ in range(_PORT_TRIES):
        port = random.randint(PORT_FIRST, PORT_LAST)
        if _binds(port):
            return port
    raise _Refusal(f"no free port between {PORT_FIRST} and {PORT_LAST} for the rendezvous", charge=False)


def _binds(port: int) -> bool:
    """Whether all addresses of both families can be bound, as torch's store does."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError:
            if family == socket.AF_INET:
                return False
            return not socket.has_ipv6 or not _has_ipv6()
    return True


def _has_ipv6() -> bool:
    """Whether this kernel lets anything bind the IPv6 wildcard."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True
