"""Checks of this machine for `phalanx doctor`: one function for each check; it returns the result and the fix."""

from __future__ import annotations

import enum
import errno
import getpass
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx import __version__
from phalanx.cli.cluster.state_folder import read_cluster_file
from phalanx.core.units import GIB, MIB, format_bytes, format_duration
from phalanx.durable_files import time_durable_write
from phalanx.node.data.rclone_remote import find_rclone, why_no_mounts
from phalanx.node.logic.operator_hooks import HooksInvalid
from phalanx.node.logic.software import listing
from phalanx.node.prepare.conda_search import find_conda
from phalanx.node.prepare.hook_runner import hooks_file, load_hooks

_DISK_LOW_BYTES: Final = 5 * GIB  # two checkpoints of a small model
_SHM: Final = "/dev/shm"  # noqa: S108  # only inspected, never written to
_SHM_LOW_BYTES: Final = 512 * MIB  # DataLoader workers and NCCL exchange tensors in it
# A supervisor of 8 ranks with data loaders opens some hundreds; a head one for each connection
_FILES_LOW: Final = 4096
_EPOCH_2024_S: Final = 1_704_067_200.0
# Name of a requirement without a marker; those of the extras have the marker `; extra == ...`.
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)[^;]*")


class Severity(enum.StrEnum):
    """Result of a check. With FAIL some function of Phalanx does not work; WARN is less severe."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check. `mend` is the fix; empty for OK."""

    what: str
    level: Severity
    says: str
    mend: str = ""


def run_machine_checks(home: str, port: int) -> Iterator[Finding]:
    """Run every check that needs no head. A check that raises becomes a finding; the others still run."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": check_python,
        "packages": check_packages,
        "state folder": lambda: check_state_folder(home),
        "rights": lambda: check_permissions(home),
        "cgroups": check_cgroups,
        "accounts": lambda: check_accounts(read_cluster_file(home)),
        "GPUs": check_gpus,
        "torch": check_torch,
        _SHM: check_shared_memory,
        "open files": check_open_files,
        "clock": check_clock,
        "software": check_software,
        "mounts": check_mounts,
        "hooks": check_hooks,
        "port": lambda: check_port(home, port),
    }
    for what, check in checks.items():
        try:
            yield check()
        except Exception as error:  # noqa: BLE001  # the operator must see every error of a check
            yield Finding(what=what, level=Severity.WARN, says=f"this check failed: {type(error).__name__}: {error}")


def check_software() -> Finding:
    """Show which environments jobs can name (`software`), as far as this takes no time; none is needed."""
    places = find_conda(os.environ)
    names = [*(["base"] if places.roots else ()), *sorted(places.environments)]
    homes = (f"{os.environ.get('MODULESHOME', '')}/init/bash", "/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh")
    modules = next((path for path in homes if os.path.exists(path)), "")
    found = {
        "conda": f"{places.program or 'no program'} with {listing(names)}" if names or places.program else "",
        "modules": modules,
        "uv": shutil.which("uv") or "",
    }
    says = "; ".join(f"{form}: {where}" for form, where in found.items() if where)
    return Finding(what="software", level=Severity.OK, says=says or "no conda, modules or uv")


def check_mounts() -> Finding:
    """Show whether jobs can mount object stores here (`data` with `mode: mount`) if this account runs the node; nothing else needs it."""
    path = os.environ.get("PATH", os.defpath)
    why = why_no_mounts(path)
    says = f"none: {why}" if why else f"object stores, by {find_rclone(path)}"
    return Finding(what="mounts", level=Severity.OK, says=says)


def check_hooks() -> Finding:
    """Check the operator's hooks of this node, as its supervisor would read them with this command's environment."""
    path = hooks_file(os.environ)
    try:
        hooks = load_hooks(path)
    except HooksInvalid as error:
        return Finding(
            what="hooks", level=Severity.FAIL, says=str(error), mend="the node takes no jobs until it is mended"
        )
    if not hooks:
        return Finding(
            what="hooks", level=Severity.OK, says=f"none: {path or 'no file is named'} does not exist or is empty"
        )
    missing = [hook.program[0] for hook in hooks if not os.access(hook.program[0], os.X_OK)]
    if missing:
        says = f"{path}: {missing[0]} cannot be executed"
        return Finding(what="hooks", level=Severity.FAIL, says=says, mend=f"chmod +x {missing[0]}, or mend the file")
    counts = Counter(hook.kind.value for hook in hooks)
    says = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return Finding(what="hooks", level=Severity.OK, says=f"{says} in {path}")


def check_python() -> Finding:
    """Check the interpreter and the operating system."""
    found = ".".join(map(str, sys.version_info[:3]))
    says = f"Python {found}, {sys.platform}, Phalanx {__version__}"
    if not sys.platform.startswith("linux"):
        return Finding(what="python", level=Severity.FAIL, says=says, mend="Phalanx runs on Linux")
    return Finding(what="python", level=Severity.OK, says=says)


def check_packages() -> Finding:
    """Check that all run-time dependencies are installed, as listed in the metadata of the package."""
    requirements = map(_REQUIREMENT.fullmatch, importlib.metadata.requires("phalanx") or ())
    needed = [found[1] for found in requirements if found is not None]
    missing = []
    for name in needed:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding(
            what="packages",
            level=Severity.FAIL,
            says=f"missing: {', '.join(missing)}",
            mend=f"pip install {' '.join(missing)}, or make install in the checkout",
        )
    return Finding(what="packages", level=Severity.OK, says=f"all {len(needed)} required packages are installed")


def check_state_folder(home: str) -> Finding:
    """Check that the state folder is writable and has free space; measure a durable write."""
    folder = home
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    probe = os.path.join(folder, f".phalanx-doctor-{os.getpid()}")
    try:
        took_s = time_durable_write(probe, b"x" * 4096)
    except OSError as error:
        return Finding(
            what="state folder",
            level=Severity.FAIL,
            says=f"{home}: {error.strerror}",
            mend="free some space"
            if error.errno in {errno.ENOSPC, errno.EDQUOT}
            else "fix its permissions, or set PHALANX_HOME",
        )
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    says = f"{home}, {format_bytes(free)} free, a durable write takes {took_s * 1000:.1f} ms"
    if free < _DISK_LOW_BYTES:
        return Finding(
            what="state folder",
            level=Severity.WARN,
            says=says,
            mend="checkpoints need space: set PHALANX_HOME to a larger disk",
        )
    return Finding(what="state folder", level=Severity.OK, says=says)


def check_permissions(home: str) -> Finding:
    """Check that other users can read neither the admin token nor the state folder."""
    token = os.path.join(home, "token")
    if not os.path.isdir(home):
        return Finding(what="rights", level=Severity.OK, says=f"{home} does not exist yet")
    if os.path.exists(token) and os.stat(token).st_mode & 0o077:
        mode = stat.S_IMODE(os.stat(token).st_mode)
        return Finding(
            what="rights",
            level=Severity.WARN,
            says=f"other users can read the admin token: {token} has mode {mode:04o}",
            mend=f"chmod 600 {token}; if others use this machine, revoke it with phalanx tokens revoke",
        )
    mode = stat.S_IMODE(os.stat(home).st_mode)
    if mode != 0o700:
        return Finding(
            what="rights", level=Severity.WARN, says=f"{home} has mode {mode:04o}, not 0700", mend=f"chmod 700 {home}"
        )
    return Finding(what="rights", level=Severity.OK, says="only this user can read the state folder and the token")


def check_cgroups() -> Finding:
    """Check that ranks can run in cgroups, by creating one and moving a process into it, and what enforces CPUs and memory of jobs."""
    from phalanx.core.fleet.node import LimitKind
    from phalanx.node.processes.containment import ContainmentFactory, ContainmentKind

    found = ContainmentFactory(f"doctor-{os.getpid()}")
    found.close()
    limits = found.limits.kind
    if found.kind is ContainmentKind.SESSION:
        return Finding(
            what="cgroups",
            level=Severity.WARN,
            says=f"not usable here ({found.reason}); processes of ranks are tracked by session and by scans of /proc; limits of jobs by {limits.value}",
            mend="run as root, or under systemd with Delegate=yes",
        )
    if limits is LimitKind.WATCHDOG:
        whys = "; ".join(found.limits.reasons.values())
        return Finding(
            what="cgroups",
            level=Severity.WARN,
            says=f"cgroup v2 with freeze and kill; limits of jobs by {limits.value} ({whys})",
            mend="run as root, or under systemd with Delegate=yes",
        )
    return Finding(
        what="cgroups", level=Severity.OK, says=f"cgroup v2 with freeze and kill; limits of jobs by {limits.value}"
    )


def check_accounts(brought_up: Mapping[str, Any]) -> Finding:
    """Check which account jobs run under, and whether it can use this Python. `brought_up`: options stored by the head."""
    from phalanx.engines.registry import DEFAULT_ENGINE, engine_type
    from phalanx.node.files.job_accounts import (
        JOBS_AS_VARIABLE,
        JOBS_DIR,
        JOBS_DIR_VARIABLE,
        first_closed_parent,
        is_architecture_supported,
    )

    what, own = "accounts", getpass.getuser()
    account = engine_type(brought_up.get("engine") or DEFAULT_ENGINE).job_account
    if account:
        return Finding(what=what, level=Severity.OK, says=f"jobs run as {account}")
    if os.geteuid() != 0:
        says = f"all jobs run as {own} and can read what {own} can; a head started by root runs them as their owners"
        return Finding(what=what, level=Severity.OK, says=says)
    if not is_architecture_supported():
        says = (
            f"all jobs run as {own}: running jobs as their owners needs x86-64 or aarch64, this is {os.uname().machine}"
        )
        return Finding(what=what, level=Severity.WARN, says=says, mend="run the head as a user that owns nothing else")
    jobs_as = brought_up.get("jobs_as")
    if (jobs_as or os.environ.get(JOBS_AS_VARIABLE)) == "head":
        by = "phalanx up --jobs-as head" if jobs_as else f"{JOBS_AS_VARIABLE}=head"
        return Finding(
            what=what, level=Severity.WARN, says=f"all jobs run as {own} ({by})", mend="phalanx up --jobs-as owner"
        )
    closed, folder = first_closed_parent(sys.executable), os.environ.get(JOBS_DIR_VARIABLE) or JOBS_DIR
    lacking = (
        f"; they cannot read {closed}, and so not use this Python: requirements, data and #SBATCH scripts do not work"
    )
    return Finding(
        what=what,
        level=Severity.OK,
        says=f"jobs run as the account of their owner, in {folder}{lacking if closed else ''}",
    )


def check_gpus() -> Finding:
    """List the GPUs that NVML reports."""
    from phalanx.node.probes.nvml import open_nvml

    probe = open_nvml()
    if probe is None:
        if os.path.exists("/dev/nvidiactl"):
            return Finding(
                what="GPUs",
                level=Severity.FAIL,
                says="a driver is loaded, but NVML finds no GPU",
                mend="run nvidia-smi",
            )
        return Finding(what="GPUs", level=Severity.OK, says="none; phalanx up uses virtual devices")
    try:
        found = probe.devices()
    finally:
        probe.close()
    models = ", ".join(sorted({device.model for device in found}))
    return Finding(
        what="GPUs",
        level=Severity.OK,
        says=f"{len(found)} x {models}, {format_bytes(sum(device.memory_bytes for device in found))} in total",
    )


def check_torch() -> Finding:
    """Check that this environment has torch. It is not imported: that takes seconds."""
    if importlib.util.find_spec("torch") is None:
        return Finding(
            what="torch",
            level=Severity.WARN,
            says="not in this environment; jobs may bring their own",
            mend="make install, or pip install '.[torch]', in the checkout",
        )
    return Finding(what="torch", level=Severity.OK, says=f"torch {importlib.metadata.version('torch')}")


def check_shared_memory() -> Finding:
    """Check that shared memory is writable and large enough."""
    found = os.statvfs(_SHM)
    free = found.f_bavail * found.f_frsize
    says = f"{format_bytes(free)} free of {format_bytes(found.f_blocks * found.f_frsize)}"
    if not os.access(_SHM, os.W_OK):
        return Finding(
            what=_SHM,
            level=Severity.FAIL,
            says=f"{says}, not writable",
            mend="mount it read-write: data loaders need it",
        )
    if free < _SHM_LOW_BYTES:
        return Finding(
            what=_SHM, level=Severity.WARN, says=says, mend="data loaders need more: in a container, --shm-size=8g"
        )
    return Finding(what=_SHM, level=Severity.OK, says=says)


def check_open_files() -> Finding:
    """Check how many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{soft} per process (at most {'any number' if hard == resource.RLIM_INFINITY else hard})"
    if soft < _FILES_LOW:
        mend = (
            f"ulimit -n {_FILES_LOW}"
            if hard == resource.RLIM_INFINITY or hard >= _FILES_LOW
            else "raise nofile in /etc/security/limits.conf"
        )
        return Finding(what="open files", level=Severity.WARN, says=says, mend=mend)
    return Finding(what="open files", level=Severity.OK, says=says)


def check_clock() -> Finding:
    """Check that the date is plausible and that CLOCK_BOOTTIME, which leases use, exists."""
    now_s, up_s = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    says = f"{time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(now_s))}, up {format_duration(up_s)}"
    if now_s < _EPOCH_2024_S:
        return Finding(
            what="clock", level=Severity.FAIL, says=says, mend="set the clock: tokens and records carry its time"
        )
    return Finding(what="clock", level=Severity.OK, says=says)


def check_port(home: str, port: int) -> Finding:
    """Check that the port is free, or used by this user's head."""
    from phalanx.cli.cluster.state_folder import find_local_head, is_alive

    record = find_local_head(home)
    if record is not None and is_alive(record.pid):
        return Finding(what="port", level=Severity.OK, says=f"{record.url} is in use by this user's head")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(
                what="port",
                level=Severity.WARN,
                says=f"{port} on 127.0.0.1: {error.strerror}",
                mend="use another port: phalanx up --port PORT",
            )
    return Finding(what="port", level=Severity.OK, says=f"{port} on 127.0.0.1 is free")
