"""Container images on this node: find the runtime, pull each image once, run a member's tasks in it, and remove all containers afterwards.

A podman container consists of three processes (podman, conmon, the rank) below the member's keeper, and of a record and a mount that
survive a SIGKILL of all three. So a member's containers are removed when it ends, and a starting supervisor removes those of dead ones.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from phalanx.node.files.cache_folder import make_cache
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic import images
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.logic.images import ContainerSettings, InstalledRuntime, RuntimeKind
from phalanx.node.logic.step_containers import STEP_RUNTIMES, StepContainers
from phalanx.node.member.container_runtime import ContainerRuntime
from phalanx.node.member.member_runtime import MemberRuntime, rank_task_id
from phalanx.node.prepare.setup_runner import IMAGE_TASK, SETUP_TASK, run_setup_command
from phalanx.node.processes.attempt_processes import AttemptProcesses
from phalanx.node.processes.file_limits import rank_file_limits
from phalanx.node.processes.proctable import identity, read_table
from phalanx.node.processes.sweeps import signal_where_allowed

_INITS: Final = (
    "/usr/libexec/podman/catatonit",
    "/usr/bin/catatonit",
    "/usr/libexec/catatonit/catatonit",
    "/usr/bin/tini-static",
)
_CDI: Final = ("/etc/cdi/*", "/var/run/cdi/*")  # container device interface: the device files of each GPU
_NO_CDI: Final = "podman has no CDI specification of this node's GPUs; generate it with nvidia-ctk cdi generate --device-name-strategy=uuid"
_FABRIC: Final = "/dev/infiniband"
_REMOVE_LIMIT_S: Final = 60.0  # podman waits some seconds for a killed conmon
_TAIL_BYTES: Final = 4096  # of a pull's output
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # the job can write the file
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,255}")
_SIGTERM: Final = 15
_SIGKILL: Final = 9
_log = logging.getLogger(__name__)


def prepare_container(
    member: MemberRuntime,
    *,
    cache: str,
    base: Mapping[str, str],
    open_output: Callable[[], int],
    gpus: Sequence[str],
) -> ContainerRuntime:
    """Make the image available on this node; it is pulled at most once.

    Args:
        member: its processes must be open.
        cache: the node's cache folder.
        base: the node's own environment, without variables of another launcher.
        open_output: as in `run_setup_command`.
        gpus: UUIDs of its devices; empty if they are virtual.

    Raises:
        PreparationFailed: no runtime is installed, the image is not available, or a folder cannot be mounted.
        OSError: the disk failed.
    """
    image = member.prepare.spec.image
    runtime = find_runtime(base.get("PATH", os.defpath), image)
    if runtime is None:
        missing = "a .sif file needs apptainer, which is not installed on this node; install it"
        if not images.is_image_file(image):
            missing = "neither podman nor apptainer is installed on this node; install one"
        raise PreparationFailed(f"image {image}: {missing}, or submit without image", charge=True)
    if gpus and runtime.kind is RuntimeKind.PODMAN and not _has_cdi():
        raise PreparationFailed(f"image {image}: {_NO_CDI}", charge=False)
    account = member.account
    folder = make_image_cache(cache, account)
    base = _with_runtime_dir(base, account)
    reference, pull = images.resolve_image(runtime, image, workdir=member.workdir, cache=folder)
    if pull:
        _pull(member, pull, base, open_output)
    else:
        with acting_as(account):
            exists = os.path.isfile(reference)
        if not exists:
            raise PreparationFailed(f"image {reference}: no such file on this node", charge=True)
    inside = ContainerRuntime(runtime=runtime, container=_settings(member, reference, gpus), base=base, account=account)
    member.cleanup.callback(_remove_containers, inside, member)
    return inside


def make_image_cache(cache: str, account: NodeAccount | None) -> str:
    """Make the folder of image files in the account's cache and return its path. It also shows that images were used here."""
    folder = os.path.join(cache, "images")
    with acting_as(account):
        make_cache(cache, account)
        os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def offer_step_containers(member: MemberRuntime, *, base: Mapping[str, str], gpus: Sequence[str]) -> StepContainers:
    """Return what the steps of a batch script need to start containers like those of a job with an image; they are removed with the member.

    Args:
        member: its processes must be open.
        base: as in `prepare_container`.
        gpus: as in `prepare_container`.
    """
    path = base.get("PATH", os.defpath)
    unavailable: dict[str, str] = {}
    found = [runtime for kind in STEP_RUNTIMES if (runtime := _installed(kind, path)) is not None]
    if gpus and not _has_cdi():
        unavailable[RuntimeKind.PODMAN.value] = _NO_CDI
    try:
        settings = _settings(member, "", gpus)
    except PreparationFailed as error:  # only for a step that has an image
        settings = _settings(member, "", gpus, mounts=())
        unavailable = dict.fromkeys(STEP_RUNTIMES, str(error))
    offer = StepContainers(settings=settings, runtimes=tuple(found), unavailable=unavailable)
    podman = next((runtime for runtime in found if runtime.kind is RuntimeKind.PODMAN), None)
    if podman is not None:
        member.cleanup.callback(_remove_step_containers, podman, offer, _with_runtime_dir(base, member.account), member)
    return offer


def _settings(
    member: MemberRuntime, image: str, gpus: Sequence[str], *, mounts: tuple[str, ...] | None = None
) -> ContainerSettings:
    """The settings of the member's containers. `mounts`: instead of its folders.

    Raises:
        PreparationFailed: a folder cannot be mounted.
    """
    account = member.account
    assert member.processes is not None
    return ContainerSettings(
        image=image,
        name=f"phalanx-{member.processes.key.marker}",
        owner=_owner(os.getpid()),
        workdir=member.workdir,
        uid=os.getuid() if account is None else account.uid,
        gid=os.getgid() if account is None else account.gid,
        mounts=_mounts(member) if mounts is None else mounts,
        folder=member.scratch.path,
        gpus=tuple(gpus),
        devices=(_FABRIC,) if os.path.isdir(_FABRIC) and gpus else (),
        nofile=rank_file_limits(),
        processes=_process_limit(),
    )


def find_runtime(path: str, image: str) -> InstalledRuntime | None:
    """The program that can run this image here; None without one. Only apptainer runs a .sif."""
    kinds = [kind for kind in RuntimeKind if kind is not RuntimeKind.PODMAN or not images.is_image_file(image)]
    return next((found for kind in kinds if (found := _installed(kind, path)) is not None), None)


def _installed(kind: RuntimeKind, path: str) -> InstalledRuntime | None:
    found = shutil.which(kind.value, path=path)
    if found is None:
        return None
    init = next((one for one in _INITS if os.access(one, os.X_OK)), "") if kind is RuntimeKind.PODMAN else ""
    return InstalledRuntime(kind=kind, path=found, init=init)


def _has_cdi() -> bool:
    return any(glob.glob(place) for place in _CDI)


def terminate_container_tasks(processes: AttemptProcesses, inside: ContainerRuntime) -> None:
    """Send SIGTERM to the processes inside the container. podman and conmon must stay: they clean up and report the exit code.

    The kernel does not deliver an unhandled SIGTERM to the first process of a container. If it is alone and has no handler, it gets SIGKILL,
    which has the same effect; otherwise it ends after the others, or when the grace time is over.
    """
    own_depth = len(_pids_in_namespaces(os.getpid()))
    table = read_table()
    found = {pid: _pids_in_namespaces(pid) for pid in processes.members() if pid in table}
    contained = {pid: numbers for pid, numbers in found.items() if len(numbers) > own_depth}
    if inside.runtime.kind is not RuntimeKind.PODMAN or not contained:
        processes.terminate()
        return
    for pid, numbers in contained.items():
        first = numbers[-1] == 1
        if first and inside.runtime.init:
            continue
        alone = first and not any(_same_namespace(pid, other) for other in contained if other != pid)
        number = _SIGKILL if alone and not _handles(pid, _SIGTERM) else _SIGTERM
        signal_where_allowed(table[pid].identity, number)
    processes.continue_stopped()


def remove_dead_containers(cache: str, path: str) -> None:
    """Remove the containers of dead supervisors, if images were ever used here. Never raises: the next supervisor retries."""
    if not os.path.isdir(os.path.join(cache, "images")) or (podman := shutil.which("podman", path=path)) is None:
        return
    listing = [podman, "ps", "--all", f"--filter=label={images.OWNER_LABEL}"]
    listed = _podman([*listing, f'--format={{{{.Names}}}} {{{{index .Labels "{images.OWNER_LABEL}"}}}}'])
    for line in listed.splitlines():
        name, _, owner = line.partition(" ")
        if _is_dead(owner):
            _log.info("removing container %s of a dead supervisor", name)
            _podman(images.podman_remove_command(podman, [name]))


def _pull(member: MemberRuntime, pull: str, base: Mapping[str, str], open_output: Callable[[], int]) -> None:
    log = os.path.join(member.scratch.path, "image.log")
    text = f"set -o pipefail; {{ {pull}; }} 2>&1 | tee {shlex.quote(log)}"
    code = run_setup_command(member, IMAGE_TASK, text, base, open_output, cwd="/")
    if code == 0:
        return
    with acting_as(member.account), open(os.open(log, _READ), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        output = file.read(_TAIL_BYTES).decode(errors="replace")
    last = next((line for line in reversed(output.splitlines()) if line.strip()), f"the pull ended with code {code}")
    raise PreparationFailed(
        f"image {member.prepare.spec.image} cannot be pulled: {last}", charge=images.is_missing_image(output)
    )


def _mounts(member: MemberRuntime) -> tuple[str, ...]:
    order = member.prepare
    resume = [] if member.local_checkpoint is None else [member.local_checkpoint.path]
    wanted = [
        member.workdir,
        member.scratch.path,
        order.output_dir,
        order.checkpoint_dir,
        member.checkpoints,
        *(path for _, path in member.data if path.startswith("/")),
        member.outputs,
        *filter(None, [member.mps]),
        *resume,
        *(one.path for one in order.candidates),
    ]
    with acting_as(member.account):
        existing = [path for path in wanted if os.path.isdir(path)]
    try:
        return images.mount_folders(existing)
    except ValueError as error:
        raise PreparationFailed(
            f"image: {error} cannot be mounted: its path has characters that no runtime accepts", charge=True
        ) from error


def _process_limit() -> tuple[int, int]:
    """The node's limit; podman accepts none above the greatest pid, and without privileges none above its own."""
    with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
        pid_max = int(file.read())
    soft, hard = (
        pid_max if one == resource.RLIM_INFINITY else min(one, pid_max)
        for one in resource.getrlimit(resource.RLIMIT_NPROC)
    )
    return soft, hard


def _remove_containers(inside: ContainerRuntime, member: MemberRuntime) -> None:
    """Remove, after a kill, the containers that podman could not remove itself."""
    if inside.runtime.kind is RuntimeKind.PODMAN:
        tasks = [SETUP_TASK, *map(rank_task_id, member.stream_starts)]
        names = [images.container_name(inside.container, task) for task in tasks]
        _podman(images.podman_remove_command(inside.runtime.path, names), inside.base, member.account)


def _remove_step_containers(
    podman: InstalledRuntime, offer: StepContainers, base: Mapping[str, str], member: MemberRuntime
) -> None:
    """Remove the containers of a script's steps, after a kill. Each step noted the name of its own; the job can write there, too."""
    prefix = images.container_name(offer.settings, "")
    noted: list[str] = []
    with acting_as(member.account), contextlib.suppress(OSError):
        noted = os.listdir(offer.notes)
    names = [name for name in noted if name.startswith(prefix) and _NAME.fullmatch(name)]
    if names:
        _podman(images.podman_remove_command(podman.path, names), base, member.account)


def _with_runtime_dir(base: Mapping[str, str], account: NodeAccount | None) -> Mapping[str, str]:
    """Add the XDG runtime folder of the account's login sessions: rootless podman keeps its state there."""
    if account is None or not os.path.isdir(folder := f"/run/user/{account.uid}"):
        return base
    return {**base, "XDG_RUNTIME_DIR": folder}


def _podman(command: Sequence[str], env: Mapping[str, str] | None = None, account: NodeAccount | None = None) -> str:
    """Run podman as the account that owns the containers; returns its output."""
    credentials: dict[str, Any] = (
        {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": account.groups}
    )
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=_REMOVE_LIMIT_S,
            check=False,
            cwd="/",
            **credentials,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s: %s", " ".join(command[:3]), error)
        return ""
    if done.returncode != 0:
        _log.warning("%s ended with code %d: %s", " ".join(command[:3]), done.returncode, done.stderr.strip()[-400:])
    return str(done.stdout)


# ---- processes and namespaces ---------------------------------------------------------------------------------------


def _owner(pid: int) -> str:
    """Identifies a supervisor: boot, pid namespace, pid and start time."""
    found = identity(pid)
    return f"{_boot()}/{os.stat('/proc/self/ns/pid').st_ino}/{pid}/{0 if found is None else found.started_ticks}"


def _is_dead(owner: str) -> bool:
    try:
        boot, namespace, pid, ticks = owner.split("/")
        if boot != _boot():
            return True
        found = identity(int(pid))
        same = int(namespace) == os.stat("/proc/self/ns/pid").st_ino  # pids of another namespace mean nothing here
        return same and (found is None or found.started_ticks != int(ticks))
    except ValueError:
        return False


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _pids_in_namespaces(pid: int) -> tuple[int, ...]:
    """Its pids, from our namespace inwards (NSpid of proc(5)); empty if it is gone."""
    return tuple(int(word) for word in _status(pid, "NSpid").split())


def _handles(pid: int, number: int) -> bool:
    """Whether it catches or ignores the signal (SigCgt and SigIgn of proc(5))."""
    mask = int(_status(pid, "SigCgt") or "0", 16) | int(_status(pid, "SigIgn") or "0", 16)
    return bool(mask >> (number - 1) & 1)


def _status(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(f"{name}:")), "")
    except OSError:
        return ""


def _same_namespace(one: int, other: int) -> bool:
    try:
        return os.stat(f"/proc/{one}/ns/pid").st_ino == os.stat(f"/proc/{other}/ns/pid").st_ino
    except OSError:
        return False
