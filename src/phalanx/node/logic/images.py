"""How a command runs in an image: the words that podman or apptainer is given, and which variables go inside.

Pure. An image changes what the command finds around it and nothing else: the same user, folders under the same paths, the node's network,
shared memory and devices; and its processes stay in the member's containment, which freezes and kills them like any others.
"""

from __future__ import annotations

import enum
import hashlib
import os.path
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

OWNER_LABEL: Final = "phalanx.owner"
SHELL: Final = (
    'if command -v bash >/dev/null 2>&1; then exec bash -c "$0"; fi; exec sh -c "$0"'  # many images have no bash
)
_SIGNALS_FROM: Final = 128  # a runtime gives 128 + N for a command that signal N ended, as a shell does
_SIGNALS_MAX: Final = 64
# Variables that would mean something to podman itself, when it was they that it found in its own environment. Names alone, as others are
# users' own, and may be secrets: REGISTRY_PASSWORD, STORAGE_KEY. Source: the strings of podman 4.3.1, crun 1.8.1 and conmon 2.1.6, containers.conf(5)
# and podman(1) of podman 5; environ(7), ld.so(8) and mallopt(3).
_READ_BY_RUNTIME: Final = frozenset({
    "CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINER_SSHKEY", "CONTAINER_PASSPHRASE", "CONTAINER_PROXY", "CONTAINER_TLS_CA",
    "CONTAINER_TLS_CERT", "CONTAINER_TLS_KEY", "CONTAINERS_CONF", "CONTAINERS_CONF_OVERRIDE", "CONTAINERS_GRAPHROOT",
    "CONTAINERS_HELPER_BINARY_DIR", "CONTAINERS_REGISTRIES_CONF", "CONTAINERS_RUNROOT", "CONTAINERS_SSH_CONF", "CONTAINERS_STORAGE_CONF",
    "REGISTRIES_CONFIG_PATH", "REGISTRY_AUTH_FILE", "STORAGE_DRIVER", "STORAGE_OPTS",
    "_CONTAINERS_USERNS_CONFIGURED", "_CONTAINERS_ROOTLESS_UID", "_CONTAINERS_ROOTLESS_GID",
    "PODMAN_CONNECTIONS_CONF", "PODMAN_RUNLABEL_NESTED", "PODMAN_SOCKET", "PODMAN_SYSTEMD_UNIT", "PODMAN_USERNS", "BUILDAH_ISOLATION",
    "CONMON_SECCOMP_NOTIFY_PLUGINS", "RUN_OCI_SECCOMP_RECEIVER", "DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS",
    "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "NOTIFY_SOCKET", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR",
    "GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK", "GLIBC_TUNABLES",
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "SHELL", "IFS", "ENV", "BASH_ENV",
})  # fmt: skip
_READ_BY_LOADER: Final = ("LD_", "MALLOC_")  # the C library's own
# Of a file of variables podman takes lines of less than 64 KiB, byte for byte past the first `=`; 4.7.0 alone read quotes in them.
# Source: pkg/env of podman, bufio.Scanner of Go; tried with 4.3.1.
_LINE_BYTES_MAX: Final = 60 << 10
# What a registry says of an image that nobody could pull, from any node. Source: messages of containers/image 5.23 and of Docker's registry.
_NO_SUCH_IMAGE: Final = (
    "manifest unknown", "name unknown", "not found", "unauthorized", "is denied", "invalid reference", "did not resolve to an alias",
    "no image found", "unsupported transport", "name invalid",
)  # fmt: skip


_NO_SUCH_PROGRAM: Final = "executable file not found"  # what Go says where the node lacks a program (newuidmap)
_NAME_CHARACTERS: Final = 100  # of an image's name in its file's, for people; a file's has 255 at most


class Runtimes(enum.StrEnum):
    """The programs that run images here, the first found taken."""

    PODMAN = "podman"
    APPTAINER = "apptainer"
    SINGULARITY = "singularity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One of them, as it is installed. `init`: a small first process for containers, "" where there is none."""

    kind: Runtimes
    path: str
    init: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contained:
    """What holds for all of a member's containers.

    Attributes:
        image: as the runtime takes it: a name for podman, a file for apptainer.
        name: begins the name of each container; the task's follows.
        owner: says which supervisor made it, so that a later one can tell whether it is alive.
        mounts: absolute folders, none below another, seen inside under the same path.
        folder: of files for the runtime, which none but the job's account can read.
        gpus: UUIDs of the devices; empty where they are virtual.
        devices: further device files or folders.
        nofile, processes: limits that the ranks have on the node: soft and hard.
    """

    image: str
    name: str
    owner: str
    workdir: str
    uid: int
    gid: int
    mounts: tuple[str, ...]
    folder: str
    gpus: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    nofile: tuple[int, int]
    processes: tuple[int, int]


def argv_of(command: tuple[str, ...] | str) -> tuple[str, ...]:
    """The words of a command inside; a text goes to the image's bash, else to its sh."""
    return ("/bin/sh", "-c", SHELL, command) if isinstance(command, str) else command


def mounts_of(paths: Iterable[str]) -> tuple[str, ...]:
    """The folders to mount, none of which lies in another; the root is never one: it would hide the image.

    Raises:
        ValueError: a path holds a character that the runtimes take for their own.
    """
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if path.startswith("/")}):
        if path == "/" or any(path.startswith(outer + "/") for outer in found):
            continue
        if any(char in path for char in ',:"\\\n'):
            raise ValueError(path)
        found.append(path)
    return tuple(found)


def wrap(
    runtime: Runtime, what: Contained, task: str, command: tuple[str, ...] | str, variables: Mapping[str, str]
) -> tuple[str, ...]:
    """The words that run a command in the image. None of them holds the value of a variable: every user of the node can read words.

    Args:
        runtime: which.
        what: see there.
        task: names the container among the member's.
        command: words, or a text for a shell.
        variables: what the command finds, besides what the image sets; `around` and `file_of_variables` bring the values.
    """
    if runtime.kind is Runtimes.PODMAN:
        return _podman_run(runtime, what, task, argv_of(command), variables)
    return _apptainer_exec(runtime, what, argv_of(command))


def around(runtime: Runtime, base: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of the runtime's own process: the node's, and the rank's variables in the form in which they go inside.

    podman's own, which it would take for itself, go by the file.
    """
    if runtime.kind is Runtimes.PODMAN:
        return {**base, **{name: value for name, value in variables.items() if not _read_by_runtime(name)}}
    prefix = "APPTAINERENV_" if runtime.kind is Runtimes.APPTAINER else "SINGULARITYENV_"
    return {**base, **{prefix + name: value for name, value in variables.items()}}


def file_of_variables(
    runtime: Runtime, what: Contained, task: str, variables: Mapping[str, str]
) -> tuple[str, bytes] | None:
    """Path and content of the file by which the variables go inside that podman would take for its own; None where there are none.

    Raises:
        ValueError: a value does not fit into a line; says which variable and what to do, and not the value.
    """
    own = _own_variables(runtime, variables)
    for name in own:
        line = f"{name}={variables[name]}".encode(errors="surrogateescape")
        if "\n" in variables[name] or "\r" in variables[name] or len(line) > _LINE_BYTES_MAX:
            why = f"goes into an image as one line of at most {_LINE_BYTES_MAX >> 10} KiB, since podman reads a variable of that name itself"
            raise ValueError(f"env: {name} {why}; take another name, or a file")
    text = "".join(f"{name}={variables[name]}\n" for name in own)
    return (_path_of_variables(what, task), text.encode(errors="surrogateescape")) if own else None


def enter(runtime: Runtime, what: Contained, task: str, argv: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
    """The words that run a further command beside a task, in its image."""
    if runtime.kind is Runtimes.PODMAN:
        return (runtime.path, "exec", "--interactive", *(["--tty"] if terminal else []), container(what, task), *argv)
    return _apptainer_exec(runtime, what, tuple(argv))


def container(what: Contained, task: str) -> str:
    """A container's name."""
    return f"{what.name}-{task}"


def reference(runtime: Runtime, image: str, *, workdir: str, cache: str) -> tuple[str, str]:
    """The image as the runtime runs it, and the shell text that brings it to this node; "" where it is a file that is there."""
    if is_file(image):
        return os.path.join(workdir, image), ""
    if runtime.kind is Runtimes.PODMAN:
        words = shlex.quote(image)
        program = shlex.quote(runtime.path)
        return image, f"{program} image exists {words} || {program} pull {words}"
    source = image if "://" in image else f"docker://{image}"
    file = os.path.join(cache, _file_name(source))
    words, fresh, lock = (shlex.quote(file + end) for end in ("", ".new", ".lock"))
    pull = f"{shlex.quote(runtime.path)} pull --force {fresh} {shlex.quote(source)} && mv {fresh} {words}"
    # Of two jobs one pulls, and the other finds it there: both would write into one file.
    return file, f"[ -e {words} ] || {{ flock 9 && {{ [ -e {words} ] || {{ {pull}; }}; }}; }} 9>{lock}"


def is_file(image: str) -> bool:
    """Whether it is a file of the working directory, and no name that a registry knows."""
    return image.endswith(".sif")


def no_such_image(said: str) -> bool:
    """Whether a pull that failed would fail on every node."""
    words = said.lower().replace(_NO_SUCH_PROGRAM, "")
    return any(word in words for word in _NO_SUCH_IMAGE)


def as_ended(code: int | None, signal: int | None) -> tuple[int | None, int | None]:
    """Code and signal of the command, from those of the runtime's process."""
    if code is not None and _SIGNALS_FROM < code <= _SIGNALS_FROM + _SIGNALS_MAX:
        return None, code - _SIGNALS_FROM
    return code, signal


# ---- the words ------------------------------------------------------------------------------------------------------


def _podman_run(
    runtime: Runtime, what: Contained, task: str, argv: tuple[str, ...], variables: Mapping[str, str]
) -> tuple[str, ...]:
    """Source: podman-run(1), 4.3. `--cgroups=disabled` and no daemon: all of it stays below the keeper and in its cgroup."""
    # Root's containers are root's; any other user is, by a user namespace, inside who they are outside, in their own groups.
    user = [f"--user={what.uid}:{what.gid}", *(["--userns=keep-id", "--group-add=keep-groups"] if what.uid else [])]
    own = _own_variables(runtime, variables)
    return (
        runtime.path, "run", "--rm", f"--name={container(what, task)}", f"--label={OWNER_LABEL}={what.owner}",
        "--cgroups=disabled", "--network=host", "--ipc=host", "--pull=never", "--http-proxy=false", "--log-driver=passthrough",
        "--security-opt=no-new-privileges", "--security-opt=label=disable", "--entrypoint=", *user,
        *([f"--init-path={runtime.init}", "--init"] if runtime.init else []),
        f"--ulimit=nofile={what.nofile[0]}:{what.nofile[1]}", f"--ulimit=nproc={what.processes[0]}:{what.processes[1]}",
        f"--workdir={what.workdir}",
        *(f"--mount=type=bind,source={path},target={path},bind-propagation=rslave" for path in what.mounts),
        *(f"--device=nvidia.com/gpu={uuid}" for uuid in what.gpus),
        *(f"--device={path}" for path in what.devices),
        *([f"--env-file={_path_of_variables(what, task)}"] if own else []),
        *(f"--env={name}" for name in sorted(variables) if name not in own),  # by name: a value of several lines stays one
        what.image, *argv,
    )  # fmt: skip


def _apptainer_exec(runtime: Runtime, what: Contained, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Source: apptainer-exec(1), 1.2. It makes no namespace of processes and no daemon; network and shared memory are the node's."""
    return (
        runtime.path, "exec", "--cleanenv", "--no-home", f"--pwd={what.workdir}",
        *(f"--bind={path}:{path}" for path in what.mounts),
        *(["--nv"] if what.gpus else []),
        what.image, *argv,
    )  # fmt: skip


def _file_name(source: str) -> str:
    """Another one for each image: by its letters and digits alone, `a/b-c` and `a/b_c` would be the same."""
    readable = "".join(char if char.isalnum() else "_" for char in source)[-_NAME_CHARACTERS:]
    return f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:16]}.sif"


def _path_of_variables(what: Contained, task: str) -> str:
    return os.path.join(what.folder, f"{task}.env")


def _own_variables(runtime: Runtime, variables: Mapping[str, str]) -> list[str]:
    """Those that the runtime would take for its own, sorted; the others' names change on the way to the inside."""
    return sorted(filter(_read_by_runtime, variables)) if runtime.kind is Runtimes.PODMAN else []


def _read_by_runtime(name: str) -> bool:
    return name in _READ_BY_RUNTIME or name.startswith(_READ_BY_LOADER)
