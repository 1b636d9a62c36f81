"""The keeper of one attempt generation on one node: starts its ranks, reports their exits, and detects when no process of it is left.

Forked by `spawner_main.py` (cold ranks: fork and exec) or by `zygote_main.py` (warm ranks: fork alone). It is a child subreaper and stays
outside its attempt's cgroup: every process that a rank starts stays below the keeper, however often it forks, changes its session or clears
its environment. When waitpid returns ECHILD no process of the attempt is left; a sweep cannot be as certain. Only then may it serve another
generation. When its socket closes, it is no longer needed or the supervisor is dead: the keeper kills all processes below it, removes the
cgroups and exits.

Requests (JSON in one packet: `J` and the text, or `M` and the text in a memory file, which is then the first descriptor):
    {"op": "spawn", "task", "command", "cwd", "env", "umask", "warm", "account"} with the output pipe as descriptor; account: null for this
        process's own, else {"uid", "gid", "groups", "bound"}, which the task changes to for good; bound: no program can regain privileges
    {"op": "serve", "confinement"}: the next generation to keep, sent only to a keeper that has reported "empty"; not answered.
        A confinement is {"cgroups", "cpus", "oom_score_adj"}: folders that each task enters, the first being that of the containment if it has
        one; the CPUs that it is bound to, [] for all; its score when memory runs out
Replies: {"op": "spawned", "task", "pid"} or {"op": "refused", "task", "stage", "errno"}
Unsolicited: {"op": "exit", "task", "pid", "code", "signal", "cpu_s", "max_rss_bytes", "ended_ns"} and {"op": "empty"}

Standard library only, Python >= 3.10, loaded by path, no import from phalanx.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from phalanx.node.processes import proctable
else:
    import _phalanx_proctable as proctable  # registered by `sibling`; the job's environment may contain another phalanx

PACKET_BYTES_MAX = 65536  # longer requests travel in a memory file; a default send buffer holds three
DESCRIPTORS_MAX = 4  # per request; two are used
START_LIMIT_S = 10.0  # from fork to exec: milliseconds, unless the file system hangs or the cgroup is frozen
EXTINGUISH_LIMIT_S = 600.0  # an uninterruptible process dies when its call ends; after this limit the engine sweeps
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
# Ignored or handled by the spawner or by Python: exec would pass ignored signals on to the rank.
_RESTORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)
_KEPT_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # every Python program starts with these two ignored
_JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}  # keyctl(2) by number; operation 1
_libc = ctypes.CDLL(None, use_errno=True)
_DIE_WITH_PARENT = (
    ctypes.c_int(PR_SET_PDEATHSIG),
    *(ctypes.c_ulong(value) for value in (signal.SIGKILL, 0, 0, 0)),
)


def do_nothing(*_: object) -> None:
    """Handle a signal that must not end a keeper. Unlike SIG_IGN, exec does not pass it on to a rank."""


class TaskRefused(Exception):
    """A task could not be started; `stage` is fork, cgroup, account, cwd or exec."""

    def __init__(self, stage: str, number: int) -> None:
        super().__init__(stage, number)
        self.stage = stage
        self.number = number


class _Launch(NamedTuple):
    """All of a task that is known before the fork. A forked Python copies each page that it touches, so the child does system calls only."""

    groups: list[int]  # open cgroup.procs of each group
    score: bytes  # for /proc/self/oom_score_adj
    programs: list[str]  # paths to try, in order
    words: list[bytes]
    env: dict[bytes, bytes]


class WarmRank(NamedTuple):
    """Returned up to the zygote's main in a freshly forked warm rank: the request; session, cgroup, stdio, cwd are set."""

    request: dict[str, Any]


def prctl(option: int, value: int | bytes) -> None:
    """Call prctl with one argument.

    Raises:
        OSError: the kernel refused.
    """
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its descriptors, close-on-exec; None at the end."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(channel, PACKET_BYTES_MAX + 1, DESCRIPTORS_MAX)
    except ConnectionResetError:
        return None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # Python's recv_fds does nothing with flags such as MSG_CMSG_CLOEXEC
    if not packet:
        return None
    text = packet[1:]
    if packet[:1] == b"M":
        with open(descriptors.pop(0), "rb") as memory:
            memory.seek(0)
            text = memory.read()
    return json.loads(text), descriptors


class ChildExitNotifier:
    """A descriptor that becomes readable when a child ends."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def clear(self) -> None:
        """Reset it; further exits make it readable again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close_in_child(self) -> None:
        """Close it in a forked child."""
        signal.set_wakeup_fd(-1)
        os.close(self.descriptor)
        os.close(self._write)


class Keeper:
    """See the module. `run` is the main loop."""

    def __init__(self, channel: socket.socket, *, confinement: dict[str, Any]) -> None:
        self._channel = channel
        self._confinement = confinement
        self._pid = os.getpid()
        self._tasks: dict[int, str] = {}
        self._populated = False
        self._wake = ChildExitNotifier()
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def run(self) -> WarmRank | None:
        """Serve until the supervisor closes the socket; returns a Rank in each warm rank, None in the keeper itself."""
        prctl(PR_SET_NAME, b"phx-keeper")
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in _KEPT_BY_PYTHON:
            signal.signal(number, do_nothing)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        _close_all_on_exec()
        poll = select.poll()
        poll.register(self._wake.descriptor, select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake.descriptor in ready:
                self._wake.clear()
                self._reap()
            if self._channel.fileno() not in ready:
                continue
            message = receive(self._channel)
            if message is None:
                self._extinguish()
                return None
            if message[0]["op"] == "serve":
                self._confinement = message[0]["confinement"]
                continue
            rank = self._spawn(*message)
            if rank is not None:
                return rank

    def _spawn(self, request: dict[str, Any], descriptors: list[int]) -> WarmRank | None:
        """Start one task and answer; returns a value only in a warm rank."""
        output = descriptors[0]
        outcome, outcome_of_child = os.pipe()
        groups: list[int] = []
        try:
            groups = _open_groups(self._confinement["cgroups"])
            launch = _prepare_launch(request, self._confinement, groups)
            os.umask(request["umask"])  # the child inherits it; a keeper makes no files
            pid = os.fork()
            if pid == 0:
                if request["warm"] is None:
                    self._exec(request, launch, output, outcome_of_child)
                os.close(outcome)
                return self._become_rank(request, launch, output, outcome_of_child)
            os.close(outcome_of_child)
            outcome_of_child = -1
            _await_start(pid, outcome)
        except TaskRefused as refusal:
            self._send({"op": "refused", "task": request["task"], "stage": refusal.stage, "errno": refusal.number})
        except OSError as error:  # the fork itself: EAGAIN over the process limit, ENOMEM
            self._send({"op": "refused", "task": request["task"], "stage": "fork", "errno": error.errno})
        else:
            self._tasks[pid] = request["task"]
            self._populated = True
            self._send({"op": "spawned", "task": request["task"], "pid": pid})
        for descriptor in (*groups, outcome, output, outcome_of_child):
            if descriptor >= 0:
                os.close(descriptor)
        self._reap()
        return None

    def _exec(self, request: dict[str, Any], launch: _Launch, output: int, outcome: int) -> NoReturn:
        """Turn this fork into the rank: enter its groups first, then exec. All other descriptors and the signal handlers end with the exec."""
        stage = "fork"
        try:
            os.setsid()
            stage = "cgroup"
            _enter(launch, self._confinement["cpus"])
            stage = "fork"
            self._die_with_keeper()
            os.dup2(self._null, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if request["account"] is not None:
                stage = "account"
                _become(request["account"])
                self._die_with_keeper()  # the kernel clears it on a change of user
            stage = "cwd"
            os.chdir(request["cwd"])
            stage = "exec"
            _exec_first(launch)
        except OSError as error:
            _fail(outcome, stage, error.errno or errno.EIO)
        except ValueError:  # a NUL in a word or an "=" in a variable's name
            _fail(outcome, stage, errno.EINVAL)

    def _become_rank(self, request: dict[str, Any], launch: _Launch, output: int, outcome: int) -> WarmRank:
        """Turn this fork into a warm rank: enter its groups first, then return into the zygote."""
        stage = "fork"
        try:
            os.setsid()
            stage = "cgroup"
            _enter(launch, self._confinement["cpus"])
            stage = "fork"
            self._die_with_keeper()
            self._wake.close_in_child()
            self._channel.detach()
            for number in _RESTORED:
                signal.signal(number, signal.SIG_IGN if number in _KEPT_BY_PYTHON else signal.SIG_DFL)
            outcome = _arrange_descriptors(self._null, output, outcome)
            if request["account"] is not None:
                stage = "account"
                _become(request["account"])
                self._die_with_keeper()
            stage = "cwd"
            os.chdir(request["cwd"])
            os.close(outcome)
            return WarmRank(request)
        except OSError as error:
            _fail(outcome, stage, error.errno or errno.EIO)

    def _die_with_keeper(self) -> None:
        """Let the kernel kill this rank when its keeper dies; exit if it is dead already."""
        if _libc.prctl(*_DIE_WITH_PARENT) != 0:
            raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
        if os.getppid() != self._pid:
            os._exit(125)

    def _reap(self) -> None:
        """Report every task that ended; adopted processes are reaped without a report."""
        try:
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                task = self._tasks.pop(pid, None)
                if task is None:
                    continue
                self._send(
                    {
                        "op": "exit",
                        "task": task,
                        "pid": pid,
                        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                        "cpu_s": usage.ru_utime + usage.ru_stime,
                        "max_rss_bytes": usage.ru_maxrss * 1024,
                        "ended_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
                    }
                )
        except ChildProcessError:
            if self._populated:
                self._populated = False
                self._send({"op": "empty"})

    def _send(self, message: dict[str, Any]) -> None:
        """Send, waiting while the supervisor is slow; if it is gone, the next receive returns None."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(json.dumps(message).encode())

    def _extinguish(self) -> None:
        """Kill everything below until nothing is left, then remove the cgroup."""
        limit = time.monotonic() + EXTINGUISH_LIMIT_S
        pause_s = 0.001
        while time.monotonic() < limit:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            for folder in self._confinement["cgroups"]:
                with contextlib.suppress(OSError):  # version 1 has no kill
                    _write(f"{folder}/cgroup.kill", b"1")
            table = proctable.read_table()
            for pid in proctable.descendants(table, [self._pid]):
                with contextlib.suppress(OSError):
                    proctable.send_signal(table[pid].identity, signal.SIGKILL)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 1.0)
        for cgroup in self._confinement["cgroups"]:
            for folder, _, _ in os.walk(cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(cgroup))  # the node's cgroup, if this was its last attempt


def _await_start(pid: int, outcome: int) -> None:
    """Wait until the child runs the task's program.

    Raises:
        TaskRefused: it reported why it cannot, or it did not start in START_LIMIT_S and was killed.
    """
    poll = select.poll()
    poll.register(outcome, select.POLLIN)
    if not poll.poll(START_LIMIT_S * 1000):
        os.kill(pid, signal.SIGKILL)
        raise TaskRefused("fork", errno.ETIMEDOUT)
    text = os.read(outcome, 256)
    if text:
        stage, _, number = text.decode().partition(" ")
        raise TaskRefused(stage, int(number))


def _fail(outcome: int, stage: str, number: int) -> NoReturn:
    """Report to the keeper and exit without running anything."""
    os.write(outcome, f"{stage} {number}".encode())
    os._exit(127)


def _open_groups(folders: list[str]) -> list[int]:
    """Open cgroup.procs of each group.

    Raises:
        TaskRefused: one cannot be opened.
    """
    opened: list[int] = []
    try:
        opened.extend(os.open(f"{folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in folders)
    except OSError as error:
        for descriptor in opened:
            os.close(descriptor)
        raise TaskRefused("cgroup", error.errno or errno.EIO) from error
    return opened


def _prepare_launch(request: dict[str, Any], confinement: dict[str, Any], groups: list[int]) -> _Launch:
    """Encode words and environment, and find the program.

    Raises:
        TaskRefused: they cannot be encoded.
    """
    command, env = request["command"], request["env"]
    try:
        return _Launch(
            groups,
            str(confinement["oom_score_adj"]).encode(),
            _find_programs(command[0], env, is_other_account=request["account"] is not None),
            [os.fsencode(word) for word in command],
            {os.fsencode(name): os.fsencode(value) for name, value in env.items()},
        )
    except ValueError as error:
        raise TaskRefused("exec", errno.EINVAL) from error


def _find_programs(name: str, env: dict[str, str], *, is_other_account: bool) -> list[str]:
    """The paths that execvp would try, in order, without those where no file is."""
    if "/" in name:
        return [name]
    paths = [os.path.join(folder, name) for folder in os.get_exec_path(env)]
    if is_other_account:  # it may see other files
        return paths
    return [path for path in paths if not path.startswith("/") or _may_exist(path)] or paths


def _may_exist(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _exec_first(launch: _Launch) -> NoReturn:
    """Run the first program that can be run, as execvp does.

    Raises:
        OSError: of the first that exists, else of the last.
        ValueError: a word or a variable is invalid.
    """
    refusal: OSError | None = None
    missing: OSError | None = None
    for path in launch.programs:
        try:
            os.execve(path, launch.words, launch.env)  # noqa: S606  the user's own command
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error
        except OSError as error:
            refusal = refusal or error
    raise refusal or missing or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _close_all_on_exec() -> None:
    """Mark all descriptors but the standard ones close-on-exec: modules that a zygote imported may have opened some."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                os.set_inheritable(int(name), False)


def _enter(launch: _Launch, cpus: list[int]) -> None:
    """Move this process into its groups, bind it to its CPUs, and set its score when memory runs out."""
    for group in launch.groups:
        os.write(group, b"0")
    if cpus:
        os.sched_setaffinity(0, cpus)
    with contextlib.suppress(OSError):  # some containers forbid it; the score is advice to the kernel
        _write("/proc/self/oom_score_adj", launch.score)


def _become(account: dict[str, Any]) -> None:
    """Switch to this account irrevocably. Groups first, user last: without root's rights the groups cannot be changed.

    Raises:
        OSError: the kernel refused, or some of the earlier rights remain.
    """
    join_keyring = _JOIN_SESSION_KEYRING.get(os.uname().machine)
    os.setgroups(account["groups"])
    os.setresgid(account["gid"], account["gid"], account["gid"])
    os.setresuid(account["uid"], account["uid"], account["uid"])
    if join_keyring is not None:
        # Leave the keyring of the account that started the supervisor; refused in some containers, which have none.
        _libc.syscall(ctypes.c_long(join_keyring), ctypes.c_long(1), None)
    if account["bound"]:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(PermissionError):
        os.setresuid(0, 0, 0)
        raise OSError(errno.ENOTRECOVERABLE, "root rights could be regained")
    if os.getresuid() != (account["uid"],) * 3 or os.getresgid() != (account["gid"],) * 3:
        raise OSError(errno.ENOTRECOVERABLE, "the account was not changed")


def _write(path: str, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


def _arrange_descriptors(null: int, output: int, outcome: int) -> int:
    """Keep open: 0 on /dev/null, 1 and 2 on the output pipe, and the outcome pipe, whose new descriptor is returned."""
    # All three were opened after 0, 1 and 2, which the supervisor always provides: no dup2 here overwrites a source.
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    kept = 3
    if outcome != kept:
        os.dup2(outcome, kept, inheritable=False)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                os.close(int(name))
    return kept
