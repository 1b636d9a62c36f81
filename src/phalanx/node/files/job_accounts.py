"""User accounts of jobs: which account a job runs under on this node, and how this process accesses that account's files.

A supervisor that runs as root starts each job under the account named like its owner (PHALANX_JOBS_AS=owner). It accesses folders that
a job can write with the rights of the job's account (`acting_as`): a link placed by the job then reaches nothing that the job could not
reach itself. Any other supervisor runs all jobs under its own account, and this module does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import pwd
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic.accounts import UID_MIN_DEFAULT, NodeAccount, is_account_name
from phalanx.wire.manifest import require_regular

JOBS_AS_VARIABLE: Final = "PHALANX_JOBS_AS"  # owner, or head: all jobs under the supervisor's own account
JOBS_DIR_VARIABLE: Final = "PHALANX_JOBS_DIR"  # parent of the folders of jobs that run under other accounts
UID_MIN_VARIABLE: Final = "PHALANX_JOBS_UID_MIN"
ROOT_JOBS_VARIABLE: Final = "PHALANX_JOBS_AS_ROOT"  # no: root's own jobs are refused too
ACCOUNT_VARIABLES: Final = (JOBS_AS_VARIABLE, JOBS_DIR_VARIABLE, UID_MIN_VARIABLE, ROOT_JOBS_VARIABLE)
JOBS_DIR: Final = "/var/lib/phalanx/jobs"
_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# setgroups, setfsuid, setfsgid. By number: the C library's setgroups changes all threads of the process.
_SYSCALLS: Final = {"x86_64": (116, 122, 123), "aarch64": (159, 151, 152)}
_QUERY: Final = 0xFFFFFFFF  # an invalid id: setfsuid(2) changes nothing and returns the current id
_libc: Final = ctypes.CDLL(None, use_errno=True)
_thread: Final = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAccountPolicy:
    """The account policy of this node. `supervisor_account`: name of the supervisor's account; "" if all jobs run under it."""

    supervisor_account: str = ""
    uid_min: int = UID_MIN_DEFAULT
    root_allowed: bool = True
    folder: str = ""

    @classmethod
    def from_environment(cls, settings: Mapping[str, str], node_folder: str) -> Self:
        """Read the policy from the environment. Creates no folder; the first job under another account does.

        Raises:
            ValueError: a setting is invalid.
        """
        wanted = settings.get(JOBS_AS_VARIABLE, "head")
        if wanted not in {"owner", "head"}:
            raise ValueError(f"{JOBS_AS_VARIABLE}={wanted}: must be owner or head")
        if wanted == "head" or os.geteuid() != 0 or not is_architecture_supported():
            return cls()
        minimum = settings.get(UID_MIN_VARIABLE) or str(UID_MIN_DEFAULT)
        if not minimum.isdecimal():
            raise ValueError(f"{UID_MIN_VARIABLE}={minimum}: must be a user id such as {UID_MIN_DEFAULT}")
        name = f"{os.path.basename(node_folder)}-{hashlib.sha256(node_folder.encode()).hexdigest()[:12]}"
        folder = os.path.join(settings.get(JOBS_DIR_VARIABLE) or JOBS_DIR, name)
        return cls(
            supervisor_account=pwd.getpwuid(0).pw_name,
            uid_min=max(1, int(minimum)),
            root_allowed=settings.get(ROOT_JOBS_VARIABLE) != "no",
            folder=folder,
        )

    def account_for(self, user: str) -> NodeAccount | None:
        """The account for a job of this user; None for the supervisor's own.

        Raises:
            PreparationFailed: the user has no account that may run jobs here; says why, and what to do.
        """
        if not self.supervisor_account:
            return None
        who = f"on this node jobs run under the account of their owner, and {user!r}"
        if user == self.supervisor_account:
            if self.root_allowed:
                return None
            raise PreparationFailed(f"{who} is refused by {ROOT_JOBS_VARIABLE}=no; submit as another user", charge=True)
        if not is_account_name(user):
            raise PreparationFailed(
                f"{who} is not an account name; ask the operator for a user that is named like the account", charge=True
            )
        try:
            found = pwd.getpwnam(user)
        except KeyError:
            why = (
                f"{who} has no account here; create it on every node (useradd {user}), or use phalanx up --jobs-as head"
            )
            raise PreparationFailed(why, charge=True) from None
        if found.pw_uid < self.uid_min:
            why = f"{who} has uid {found.pw_uid}, below {self.uid_min}, the range of system accounts; {UID_MIN_VARIABLE} sets where user accounts begin"
            raise PreparationFailed(why, charge=True)
        return NodeAccount(
            name=user,
            uid=found.pw_uid,
            gid=found.pw_gid,
            groups=tuple(sorted(os.getgrouplist(user, found.pw_gid))),
            home=found.pw_dir,
            shell=found.pw_shell or "/bin/sh",
        )


def is_architecture_supported() -> bool:
    """Whether the system calls that change the account of a thread are known for this architecture."""
    return platform.machine() in _SYSCALLS


SINGLE_ACCOUNT: Final = JobAccountPolicy()
"""For a supervisor that cannot switch accounts, or is configured not to."""


def remove_empty_job_folders(folder: str) -> None:
    """Remove the folder of other accounts' jobs if it is empty."""
    for name in ("attempts", "checkpoints", "mounts/caches", "mounts", ""):
        with contextlib.suppress(OSError):  # absent, or not empty: the next incarnation of the supervisor may use it
            os.rmdir(os.path.join(folder, name))


@contextlib.contextmanager
def acting_as(account: NodeAccount | None) -> Iterator[None]:
    """Give this thread the file access rights of the account, and no others; None changes nothing.

    Only file access changes (setfsuid(2)); rights for signals and the network do not. A thread started inside keeps these rights until
    it ends, so start no long-lived thread here.

    Raises:
        OSError: the rights could not be changed; the body does not run.
    """
    if account is None:
        yield
        return
    if getattr(_thread, "account", None) is not None:
        assert _thread.account == account, "one account at a time"
        yield
        return
    own = os.getgroups()
    _thread.account = account
    try:
        _set(account.uid, account.gid, account.groups)
        yield
    finally:
        _thread.account = None
        _set(0, os.getegid(), own)


def make_owned_folder(path: str, account: NodeAccount | None) -> None:
    """Create a folder that belongs to the account alone, in a parent that only root can write. Idempotent.

    Raises:
        OSError: it cannot be created, or the path belongs to another account.
    """
    if account is None:
        os.makedirs(path, mode=0o700, exist_ok=True)
        return
    parent = os.path.dirname(path)
    make_passable_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    descriptor = os.open(path, _OPEN_FOLDER)
    try:
        if os.fstat(descriptor).st_uid not in (0, account.uid):
            raise PermissionError(f"{path} belongs to another account; remove it")
        os.fchown(descriptor, account.uid, account.gid)
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def open_for_writing(path: str, mode: int = 0o666) -> int:
    """Create or truncate a file in a folder that a job can write. O_NONBLOCK: a pipe at that path must not block the supervisor.

    Raises:
        OSError: it cannot be created, or the path is not a regular file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    return require_regular(os.open(path, flags, mode), path)


def make_passable_folder(folder: str) -> None:
    """Create a folder of root that other accounts may pass through but neither list nor write.

    Raises:
        OSError: it cannot be created, or another account can write it or a folder above it.
    """
    missing = []
    at = folder
    while not os.path.lexists(at):
        missing.append(at)
        at = os.path.dirname(at)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o711)
            os.chmod(path, 0o711)  # noqa: S103  other accounts pass through, but cannot list or write it
    at = folder
    while True:
        seen = os.lstat(at)
        sticky = bool(seen.st_mode & stat.S_ISVTX) and at != folder
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != 0 or (seen.st_mode & 0o022 and not sticky):
            raise PermissionError(
                f"{at} can be changed by accounts other than root; set {JOBS_DIR_VARIABLE} to a folder that only root can write"
            )
        if not seen.st_mode & 0o001:
            raise PermissionError(
                f"{at} is closed to the accounts of jobs; set {JOBS_DIR_VARIABLE} to a folder that other accounts may pass through"
            )
        if at == os.path.dirname(at):
            return
        at = os.path.dirname(at)


def first_closed_parent(path: str) -> str:
    """The first folder above a file, with links followed, that other accounts cannot pass through; "" if they can reach the file."""
    for one in (os.path.abspath(path), os.path.realpath(path)):
        at = os.path.dirname(one)
        above = []
        while at != os.path.dirname(at):
            above.append(at)
            at = os.path.dirname(at)
        for folder in reversed(above):
            if not os.stat(folder).st_mode & 0o001:
                return folder
    return ""


def _set(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Set the file access rights of this thread. Groups first, user last: without root's rights the groups cannot be changed.

    Raises:
        OSError: the kernel refused, for example without CAP_SETUID.
    """
    setgroups, setfsuid, setfsgid = _SYSCALLS[platform.machine()]
    numbers = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(setgroups), ctypes.c_long(len(groups)), numbers) != 0:
        raise OSError(ctypes.get_errno(), f"setgroups: {os.strerror(ctypes.get_errno())}")
    for call, wanted in ((setfsgid, gid), (setfsuid, uid)):
        _libc.syscall(ctypes.c_long(call), ctypes.c_uint32(wanted))
        if _libc.syscall(ctypes.c_long(call), ctypes.c_uint32(_QUERY)) & _QUERY != wanted:
            raise PermissionError(f"this process may not act as user {uid}: CAP_SETUID and CAP_SETGID are missing")
