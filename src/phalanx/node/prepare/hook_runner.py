"""Runs the programs that a node's operator configured: prolog and epilog of each start of a job, and health checks.

The programs run as the supervisor's account, each in a process group of its own. The file is read again for each use, so that a change needs no
restart. A journal in the node's folder names each start whose epilog is still due: the next supervisor runs it before it accepts jobs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.state.reports import NodeHealthReported
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.files.private_files import write_private
from phalanx.node.logic.operator_hooks import (
    HOOKS_VARIABLE,
    HookEffect,
    HookKind,
    HookRun,
    HooksInvalid,
    OperatorHook,
    judge_hook,
    last_line,
    parse_hooks,
)
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.processes.file_limits import wait_readable

_SYSTEM_FILE: Final = "/etc/phalanx/hooks.toml"
_USER_FILE: Final = ".config/phalanx/hooks.toml"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NODE_KEY: Final = "PHALANX_NODE_KEY"
_TAIL_BYTES: Final = 4096  # of a program's output; it may print without end
_TERM_S: Final = 2.0  # between SIGTERM and SIGKILL of a program that is out of time
_POLL_S: Final = 0.1
_FILE_BYTES_MAX: Final = 1 << 20
_LINKS_MAX: Final = 40  # as the kernel follows
_RECENT_S: Final = 10.0  # a health check this recent is not repeated before a job
_LOOK_S: Final = 30.0  # a file that appears or changes is noticed after this
_REPEAT_S: Final = 600.0  # a failure is reported again: meanwhile an operator, or the limit of cordons, may have kept the node in service
_log = logging.getLogger(__name__)


def hooks_file(environment: Mapping[str, str]) -> str:
    """Return the path of the operator's file: as root only one that root can write."""
    if HOOKS_VARIABLE in environment:
        return environment[HOOKS_VARIABLE]
    if os.geteuid() == 0:
        return _SYSTEM_FILE
    home = environment.get("HOME", "")
    return os.path.join(home, _USER_FILE) if home else ""


def load_hooks(path: str) -> tuple[OperatorHook, ...]:
    """Read the file; no hooks without it.

    Raises:
        HooksInvalid: it is not valid, or another account may write it or one of its programs.
    """
    if not path or not os.path.lexists(path):
        return ()
    try:
        _check_owner(path)
        with open(path, encoding="utf-8") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
        if len(text) > _FILE_BYTES_MAX:
            raise HooksInvalid("it is longer than 1 MiB")
        hooks = parse_hooks(text)
        for hook in hooks:
            _check_owner(hook.program[0])
    except (HooksInvalid, OSError, UnicodeError) as error:
        raise HooksInvalid(f"hooks file {path}: {error}") from error
    return hooks


def run_hook(hook: OperatorHook, variables: Mapping[str, str], cancelled: threading.Event | None = None) -> HookRun:
    """Run the program and wait for it, not for processes that it leaves. Its process group is killed when its time is over or `cancelled` is set."""
    end_s = time.monotonic() + hook.timeout_s
    reader, writer = os.pipe()
    tail = b""
    try:
        try:
            process = subprocess.Popen(
                list(hook.program),
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env=dict(variables),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return HookRun(code=None, error=f"cannot start: {error.strerror or error}")
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        open_pipe = True
        while process.poll() is None:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or (cancelled is not None and cancelled.is_set()):
                _kill_group(process)
                tail, _ = _read_tail(reader, tail)
                return HookRun(code=None, last_line=last_line(tail))
            if open_pipe and wait_readable(reader, min(left_s, _POLL_S)):
                tail, open_pipe = _read_tail(reader, tail)
            elif not open_pipe:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(left_s, _POLL_S))
        tail, _ = _read_tail(reader, tail)
    finally:
        os.close(reader)
    code = process.returncode
    return HookRun(code=code if code >= 0 else 128 - code, last_line=last_line(tail))


class OperatorHooks:
    """The hooks of one node.

    Args:
        path: of the operator's file; "" for none.
        folder: the node's folder, for the journal.
        node_key: marks the processes, so that an engine ends them with a dead supervisor.
        report: sends an event to the head.
    """

    def __init__(
        self, path: str, node_id: NodeId, folder: str, node_key: str, report: Callable[[NodeHealthReported], None]
    ) -> None:
        self._path, self._node_id, self._report = path, node_id, report
        self._journal = os.path.join(folder, "hooks")
        self._base = {"PATH": _PATH, "HOME": "/", _NODE_KEY: node_key, "PHALANX_NODE": node_id}
        self._health_lock = threading.Lock()
        self._checked_s: dict[OperatorHook, float] = {}
        self._failing: dict[str, str] = {}
        self._reported: tuple[str, float] | None = None  # the last text, and when

    @property
    def may_run(self) -> bool:
        """Whether there is a file, so that preparation may take long."""
        return bool(self._path) and os.path.lexists(self._path)

    def before_job(self, member: MemberRuntime, devices: tuple[str, ...], note: Callable[[str], None]) -> None:
        """Run the health checks that are not recent, then the prologs of the job's queue in the order of the file.

        Raises:
            PreparationFailed: the node is cordoned, or the job is at fault, or the job was stopped meanwhile.
        """
        if not self.may_run:
            return
        failed = self._check_health(_RECENT_S, member.cancelled)
        _unless_cancelled(member)
        if failed:
            raise PreparationFailed(failed, charge=False, node_fault=True)
        variables = self._job_variables(member, devices)
        hooks = load_hooks(self._path)
        if not any(hook.kind is not HookKind.HEALTH for hook in hooks):
            return
        # Synced before the first program starts: after a crash the epilog undoes also what half a prolog did.
        write_private(self._journal, _journal_name(member), json.dumps(variables))
        for hook in self._of(hooks, HookKind.PROLOG, variables["PHALANX_QUEUE"]):
            run = run_hook(hook, self._variables(hook, variables), member.cancelled)
            _unless_cancelled(member)
            effect, text = judge_hook(hook, run)
            if effect is HookEffect.NONE:
                continue
            _log.warning("job %s: %s", member.key.job_id, text)
            if effect is HookEffect.WARN:
                note(text)
            elif effect is HookEffect.FAIL:
                raise PreparationFailed(text, charge=True, exit_code=run.code or 1)
            else:
                self._report(NodeHealthReported(node_id=self._node_id, why=text, checked=False))
                raise PreparationFailed(text, charge=False, node_fault=True)

    def after_job(self, member: MemberRuntime) -> None:
        """Run the epilogs, if `before_job` began for this start. Never raises: the devices become free in any case."""
        path = os.path.join(self._journal, _journal_name(member))
        if self._path and os.path.exists(path):
            self._run_epilogs(path)

    def recover(self) -> None:
        """Run the epilogs that an earlier supervisor of this node did not finish."""
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._journal)):
                _log.warning("an earlier supervisor did not finish the epilog of %s", name)
                self._run_epilogs(os.path.join(self._journal, name))

    def watch(self, ended: threading.Event) -> None:
        """Run each health check at its interval until `ended`."""
        while True:
            try:
                if self.may_run:
                    self._check_health(None, ended)
            except OSError as error:  # no descriptor or process is left: the next turn may have one
                _log.warning("health checks could not run: %s", error)
            if ended.wait(min([_LOOK_S, *(hook.interval_s for hook in tuple(self._checked_s))])):
                return

    def _run_epilogs(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as file:
                variables: dict[str, str] = json.load(file)
            for hook in self._of(load_hooks(self._path), HookKind.EPILOG, variables["PHALANX_QUEUE"]):
                effect, text = judge_hook(hook, run_hook(hook, self._variables(hook, variables)))
                if effect is not HookEffect.NONE:
                    _log.warning("job %s: %s", variables["PHALANX_JOB_ID"], text)
                if effect is HookEffect.DRAIN:
                    self._report(NodeHealthReported(node_id=self._node_id, why=text, checked=False))
        except (HooksInvalid, OSError, ValueError, KeyError) as error:
            _log.warning("epilog: %s", error)
            self._report(NodeHealthReported(node_id=self._node_id, why=f"epilog: {error}", checked=False))
        except Exception as error:  # noqa: BLE001  our bug; without an end the devices would never become free
            _log.exception("epilog")
            self._report(NodeHealthReported(node_id=self._node_id, why=f"epilog: {error}", checked=False))
        with contextlib.suppress(OSError):
            os.remove(path)

    def _check_health(self, max_age_s: float | None, cancelled: threading.Event) -> str:
        """Run the checks that are older than `max_age_s` (None: than their intervals); return what fails, and report a change."""
        while not self._health_lock.acquire(timeout=_POLL_S):
            if cancelled.is_set():
                return ""
        try:
            try:
                hooks = tuple(self._of(load_hooks(self._path), HookKind.HEALTH, None))
            except HooksInvalid as error:
                return self._report_health({"": str(error)})
            known = {hook.name for hook in hooks}
            self._checked_s = {hook: at_s for hook, at_s in self._checked_s.items() if hook in hooks}
            failing = {name: text for name, text in self._failing.items() if name in known}
            for hook in hooks:
                age_s = time.monotonic() - self._checked_s.get(hook, float("-inf"))
                if age_s < (hook.interval_s if max_age_s is None else max_age_s):
                    continue
                run = run_hook(hook, self._variables(hook, {}), cancelled)
                if cancelled.is_set():
                    return ""
                effect, text = judge_hook(hook, run)
                self._checked_s[hook] = time.monotonic()
                failing.pop(hook.name, None)
                if effect is HookEffect.WARN:
                    _log.warning("%s", text)
                elif effect is HookEffect.DRAIN:
                    failing[hook.name] = text
            return self._report_health(failing)
        finally:
            self._health_lock.release()

    def _report_health(self, failing: dict[str, str]) -> str:
        self._failing = failing
        text, now_s = "; ".join(failing.values()), time.monotonic()
        repeat = text and self._reported is not None and now_s - self._reported[1] > _REPEAT_S
        if self._reported is None or self._reported[0] != text or repeat:
            self._reported = (text, now_s)
            self._report(NodeHealthReported(node_id=self._node_id, why=text, checked=True))
        return text

    def _of(self, hooks: tuple[OperatorHook, ...], kind: HookKind, queue: str | None) -> Iterator[OperatorHook]:
        return (hook for hook in hooks if hook.kind is kind and hook.concerns(self._node_id, queue))

    def _variables(self, hook: OperatorHook, job: Mapping[str, str]) -> dict[str, str]:
        return {**self._base, **job, "PHALANX_HOOK": hook.kind.value}

    def _job_variables(self, member: MemberRuntime, devices: tuple[str, ...]) -> dict[str, str]:
        spec, key = member.prepare.spec, member.key
        uid, gid = (os.geteuid(), os.getegid()) if member.account is None else (member.account.uid, member.account.gid)
        return {
            "PHALANX_JOB_ID": key.job_id,
            "PHALANX_EPOCH": str(key.epoch),
            "PHALANX_GENERATION": str(key.generation),
            "PHALANX_USER": member.prepare.user,
            "PHALANX_UID": str(uid),
            "PHALANX_GID": str(gid),
            "PHALANX_QUEUE": spec.queue or "default",
            "PHALANX_PROJECT": spec.project,
            "PHALANX_NODE_RANK": str(member.grant.node_rank),
            "PHALANX_NODE_COUNT": str(len(member.prepare.allocation.grants)),
            "PHALANX_DEVICES": ",".join(map(str, member.grant.devices)),
            "PHALANX_DEVICE_UUIDS": ",".join(devices),
        }


def _journal_name(member: MemberRuntime) -> str:
    return f"{member.key.job_id}.{member.key.epoch}.{member.key.generation}"


def _unless_cancelled(member: MemberRuntime) -> None:
    if member.cancelled.is_set():
        raise PreparationFailed("the job was stopped during preparation", charge=False)


def _check_owner(path: str, links: int = 0) -> str:
    """Check that only root and this account can change the file, or put another one in its place; return its real path.

    Every folder and symbolic link on the way is checked, since a user who can change one of them chooses the file.

    Raises:
        HooksInvalid: another account can, or too many symbolic links.
        OSError: it does not exist.
    """
    if path == "/":
        place = "/"
    else:
        place = os.path.join(_check_owner(os.path.dirname(os.path.abspath(path)), links), os.path.basename(path))
    found = os.lstat(place)
    link = stat.S_ISLNK(found.st_mode)
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX  # there only its owner can replace a file
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky and not link
    if found.st_uid not in (0, os.geteuid()) or writable:
        raise HooksInvalid(f"{place} can be changed by other accounts; it must belong to root or to uid {os.geteuid()}")
    if not link:
        return place
    if links >= _LINKS_MAX:
        raise HooksInvalid(f"{path} has more than {_LINKS_MAX} symbolic links")
    return _check_owner(os.path.join(os.path.dirname(place), os.readlink(place)), links + 1)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the program and its process group. The group exists until the program has been waited for."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    end_s = time.monotonic() + _TERM_S
    while time.monotonic() < end_s and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(_POLL_S / 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible call it dies later
        process.wait(_TERM_S)


def _read_tail(reader: int, tail: bytes) -> tuple[bytes, bool]:
    """Read what is there, at most a pipe's worth; return the new tail, and whether the pipe is still open."""
    for _ in range(16):
        try:
            piece = os.read(reader, 1 << 16)
        except BlockingIOError:
            return tail, True
        if not piece:
            return tail, False
        tail = (tail + piece)[-_TAIL_BYTES:]
    return tail, True
