"""Jobs as their owners: whose account a job runs under on this node, and how this process touches that account's files.

A supervisor that is root starts each job as the account that has its owner's name (PHALANX_JOBS_AS=owner). Whatever root would do in a folder
that a job can write is done as the job's account instead (`acting_as`): then a link that the job put there leads root nowhere that the job
could not have gone itself. Any other supervisor has one account for all jobs, its own, and everything here does nothing.
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

from phalanx.node.logic.accounts import UID_MIN_DEFAULT, Account, is_account_name
from phalanx.node.shell.refusal import Refusal
from phalanx.wire.manifest import regular

JOBS_AS_VARIABLE: Final = "PHALANX_JOBS_AS"  # owner, or head: all as the supervisor's own account
JOBS_DIR_VARIABLE: Final = "PHALANX_JOBS_DIR"  # where the folders of other accounts' jobs lie
UID_MIN_VARIABLE: Final = "PHALANX_JOBS_UID_MIN"
ROOT_VARIABLE: Final = "PHALANX_JOBS_AS_ROOT"  # no: root's own jobs are refused too
SETTINGS: Final = (JOBS_AS_VARIABLE, JOBS_DIR_VARIABLE, UID_MIN_VARIABLE, ROOT_VARIABLE)
JOBS_DIR: Final = "/var/lib/phalanx/jobs"
_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# setgroups, setfsuid, setfsgid. By number, since the C library's setgroups changes all threads at once.
_SYSCALLS: Final = {"x86_64": (116, 122, 123), "aarch64": (159, 151, 152)}
_ASK: Final = 0xFFFFFFFF  # no id: setfsuid(2) changes nothing and gives the present one
_libc: Final = ctypes.CDLL(None, use_errno=True)
_here: Final = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAccounts:
    """Whose account jobs run under on this node. `own`: the supervisor's account by name; "" where all jobs run as it."""

    own: str = ""
    uid_min: int = UID_MIN_DEFAULT
    root_allowed: bool = True
    folder: str = ""

    @classmethod
    def of_settings(cls, given: Mapping[str, str], node_folder: str) -> Self:
        """As the settings say and this process may. Makes nothing: the folder of other accounts' jobs comes with the first of them.

        Raises:
            ValueError: a setting is none.
        """
        wanted = given.get(JOBS_AS_VARIABLE, "head")
        if wanted not in {"owner", "head"}:
            raise ValueError(f"{JOBS_AS_VARIABLE}={wanted}: it is owner or head")
        if wanted == "head" or os.geteuid() != 0 or not knows_this_machine():
            return cls()
        least = given.get(UID_MIN_VARIABLE) or str(UID_MIN_DEFAULT)
        if not least.isdecimal():
            raise ValueError(f"{UID_MIN_VARIABLE}={least}: it is a number of a user, as {UID_MIN_DEFAULT}")
        name = f"{os.path.basename(node_folder)}-{hashlib.sha256(node_folder.encode()).hexdigest()[:12]}"
        folder = os.path.join(given.get(JOBS_DIR_VARIABLE) or JOBS_DIR, name)
        return cls(
            own=pwd.getpwuid(0).pw_name,
            uid_min=max(1, int(least)),
            root_allowed=given.get(ROOT_VARIABLE) != "no",
            folder=folder,
        )

    def of(self, user: str) -> Account | None:
        """The account for a job of this user; None for the supervisor's own.

        Raises:
            Refusal: there is none that it may run under; says which, and what to do.
        """
        if not self.own:
            return None
        who = f"jobs run as the account of their owner on this node, and {user or 'nobody'!r}"
        if user == self.own:
            if self.root_allowed:
                return None
            raise Refusal(f"{who} may not: {ROOT_VARIABLE}=no; submit as another user", charge=True)
        if not is_account_name(user):
            raise Refusal(
                f"{who} is no name of an account; ask the operator for a user named like the account", charge=True
            )
        try:
            found = pwd.getpwnam(user)
        except KeyError:
            why = f"{who} is no account here; make one on every node (useradd {user}), or phalanx up --jobs-as head"
            raise Refusal(why, charge=True) from None
        if found.pw_uid < self.uid_min:
            why = f"{who} has number {found.pw_uid}, below {self.uid_min}, which are the system's; {UID_MIN_VARIABLE} says where people begin"
            raise Refusal(why, charge=True)
        return Account(
            name=user,
            uid=found.pw_uid,
            gid=found.pw_gid,
            groups=tuple(sorted(os.getgrouplist(user, found.pw_gid))),
            home=found.pw_dir,
            shell=found.pw_shell or "/bin/sh",
        )


def knows_this_machine() -> bool:
    """Whether the calls by which a thread changes its account are known for this architecture."""
    return platform.machine() in _SYSCALLS


ONE_ACCOUNT: Final = JobAccounts()
"""Of a supervisor that may not switch users, or shall not."""


def leave(folder: str) -> None:
    """Remove the folder of other accounts' jobs where nothing of them is in it."""
    for name in ("attempts", "checkpoints", ""):
        with contextlib.suppress(OSError):  # it was never made, or holds what the next life of the supervisor may use
            os.rmdir(os.path.join(folder, name))


@contextlib.contextmanager
def acting_as(account: Account | None) -> Iterator[None]:
    """Within it this thread opens, makes and removes files with the rights of the account, and no others; None changes nothing.

    Only what concerns files changes (setfsuid(2)): signals and the network stay ours. A thread begun within it keeps these rights until
    its end, so nothing that lives longer may be begun here.

    Raises:
        OSError: the rights could not be changed; nothing was done then.
    """
    if account is None:
        yield
        return
    if getattr(_here, "account", None) is not None:
        assert _here.account == account, "one account at a time"
        yield
        return
    own = os.getgroups()
    _here.account = account
    try:
        _set(account.uid, account.gid, account.groups)
        yield
    finally:
        _here.account = None
        _set(0, os.getegid(), own)


def owned_folder(path: str, account: Account | None) -> None:
    """Have a folder that is the account's alone, in a parent that is ours alone to write. Harmless twice.

    Raises:
        OSError: it cannot be made, or another one stands there.
    """
    if account is None:
        os.makedirs(path, mode=0o700, exist_ok=True)
        return
    parent = os.path.dirname(path)
    way_to(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    descriptor = os.open(path, _OPEN_FOLDER)
    try:
        if os.fstat(descriptor).st_uid not in (0, account.uid):
            raise PermissionError(f"{path} is another account's; remove it")
        os.fchown(descriptor, account.uid, account.gid)
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def open_to_write(path: str, mode: int = 0o666) -> int:
    """A descriptor of a file, made or emptied, in a folder that a job can write: a pipe in its place would hold us until somebody reads.

    Raises:
        OSError: it cannot be made, or something else stands there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    return regular(os.open(path, flags, mode), path)


def way_to(folder: str) -> None:
    """Have a folder of ours that others may pass through but neither list nor write.

    Raises:
        OSError: it cannot be made, or somebody else can write it or a folder above it.
    """
    missing = []
    at = folder
    while not os.path.lexists(at):
        missing.append(at)
        at = os.path.dirname(at)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o711)
            os.chmod(path, 0o711)  # noqa: S103  to be passed through is what it is for; not listed, not written
    at = folder
    while True:
        seen = os.lstat(at)
        sticky = bool(seen.st_mode & stat.S_ISVTX) and at != folder
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != 0 or (seen.st_mode & 0o022 and not sticky):
            raise PermissionError(
                f"{at} can be changed by others than root; set {JOBS_DIR_VARIABLE} to a folder of root's"
            )
        if not seen.st_mode & 0o001:
            raise PermissionError(
                f"{at} is closed to the accounts of jobs; set {JOBS_DIR_VARIABLE} to a folder that they may pass"
            )
        if at == os.path.dirname(at):
            return
        at = os.path.dirname(at)


def closed_on_the_way(path: str) -> str:
    """The first folder above a file, followed through its links, that other accounts cannot pass; "" where they reach it."""
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
    """Of this thread alone. The groups go first and the user last: with the user's rights nothing of it could be changed.

    Raises:
        OSError: the kernel refused, as without CAP_SETUID.
    """
    setgroups, setfsuid, setfsgid = _SYSCALLS[platform.machine()]
    numbers = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(setgroups), ctypes.c_long(len(groups)), numbers) != 0:
        raise OSError(ctypes.get_errno(), f"setgroups: {os.strerror(ctypes.get_errno())}")
    for call, wanted in ((setfsgid, gid), (setfsuid, uid)):
        _libc.syscall(ctypes.c_long(call), ctypes.c_uint32(wanted))
        if _libc.syscall(ctypes.c_long(call), ctypes.c_uint32(_ASK)) & _ASK != wanted:
            raise PermissionError(f"this process may not act as user {uid}: CAP_SETUID and CAP_SETGID are missing")
