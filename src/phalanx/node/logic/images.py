"""Build the podman or apptainer command line that runs a command in an image, and pass its environment variables.

Pure. An image changes only the file system: the user, folder paths, network, shared memory and devices stay the node's. The processes stay
in the member's containment, which freezes and kills them like any others.
"""

from __future__ import annotations

import enum
import hashlib
import os.path
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.node.logic.variables.secret_variables import secret_names

OWNER_LABEL: Final = "phalanx.owner"
# Many images have no bash.
SHELL: Final = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$0"; fi; exec sh -c "$0"'
_SIGNALS_FROM: Final = 128  # a runtime exits with 128 + N for a command that signal N ended, as a shell does
_SIGNALS_MAX: Final = 64
# Variables that podman itself would interpret in its own environment. Exact names, not prefixes: similar ones are users' own, and may be
# secrets (REGISTRY_PASSWORD, STORAGE_KEY). Source: the strings of podman 4.3.1, crun 1.8.1 and conmon 2.1.6, containers.conf(5) and podman(1)
# of podman 5; environ(7), ld.so(8) and mallopt(3).
_READ_BY_RUNTIME: Final = frozenset(
    {
        "CONTAINER_HOST",
        "CONTAINER_CONNECTION",
        "CONTAINER_SSHKEY",
        "CONTAINER_PASSPHRASE",
        "CONTAINER_PROXY",
        "CONTAINER_TLS_CA",
        "CONTAINER_TLS_CERT",
        "CONTAINER_TLS_KEY",
        "CONTAINERS_CONF",
        "CONTAINERS_CONF_OVERRIDE",
        "CONTAINERS_GRAPHROOT",
        "CONTAINERS_HELPER_BINARY_DIR",
        "CONTAINERS_REGISTRIES_CONF",
        "CONTAINERS_RUNROOT",
        "CONTAINERS_SSH_CONF",
        "CONTAINERS_STORAGE_CONF",
        "REGISTRIES_CONFIG_PATH",
        "REGISTRY_AUTH_FILE",
        "STORAGE_DRIVER",
        "STORAGE_OPTS",
        "_CONTAINERS_USERNS_CONFIGURED",
        "_CONTAINERS_ROOTLESS_UID",
        "_CONTAINERS_ROOTLESS_GID",
        "PODMAN_CONNECTIONS_CONF",
        "PODMAN_RUNLABEL_NESTED",
        "PODMAN_SOCKET",
        "PODMAN_SYSTEMD_UNIT",
        "PODMAN_USERNS",
        "BUILDAH_ISOLATION",
        "CONMON_SECCOMP_NOTIFY_PLUGINS",
        "RUN_OCI_SECCOMP_RECEIVER",
        "DBUS_SESSION_BUS_ADDRESS",
        "DBUS_SYSTEM_BUS_ADDRESS",
        "LISTEN_FDS",
        "LISTEN_FDNAMES",
        "LISTEN_PID",
        "NOTIFY_SOCKET",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "XDG_RUNTIME_DIR",
        "GODEBUG",
        "GOGC",
        "GOMAXPROCS",
        "GOMEMLIMIT",
        "GOTRACEBACK",
        "GLIBC_TUNABLES",
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "TMPDIR",
        "SHELL",
        "IFS",
        "ENV",
        "BASH_ENV",
    }
)
_READ_BY_LOADER: Final = ("LD_", "MALLOC_")  # the C library's
# podman reads lines of an environment file up to 64 KiB, byte for byte after the first `=`; only 4.7.0 interpreted quotes.
# Source: pkg/env of podman, bufio.Scanner of Go; tested with 4.3.1.
_LINE_BYTES_MAX: Final = 60 << 10
# Registry errors that mean the pull would fail on every node. Source: messages of containers/image 5.23 and of Docker's registry.
_NO_SUCH_IMAGE: Final = (
    "manifest unknown",
    "name unknown",
    "not found",
    "unauthorized",
    "is denied",
    "invalid reference",
    "did not resolve to an alias",
    "no image found",
    "unsupported transport",
    "name invalid",
)
_NO_SUCH_PROGRAM: Final = "executable file not found"  # Go's message if the node lacks a program (newuidmap)
_NAME_CHARACTERS: Final = 100  # of the image's name in its file name, for people; a file name has at most 255 bytes


class RuntimeKind(enum.StrEnum):
    """The programs that can run images, in order of preference."""

    PODMAN = "podman"
    APPTAINER = "apptainer"
    SINGULARITY = "singularity"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRuntime:
    """An installed program that runs images. `init`: path of a minimal init process for containers; "" without one."""

    kind: RuntimeKind
    path: str
    init: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """The settings that all containers of a member share.

    Attributes:
        image: as the runtime expects it: a name for podman, a file for apptainer.
        name: prefix of each container's name; the task's follows.
        owner: identifies the supervisor that made it, so that a later one can check whether it is alive.
        mounts: absolute folders, none below another, mounted under the same path.
        folder: for the runtime's files, readable by the job's account alone.
        gpus: UUIDs of the devices; empty for virtual devices.
        devices: further device files or folders.
        nofile, processes: soft and hard limits of the ranks on the node.
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


def shell_argv(command: tuple[str, ...] | str) -> tuple[str, ...]:
    """Return the argument list of a command; a text runs in the image's bash, else in its sh."""
    return ("/bin/sh", "-c", SHELL, command) if isinstance(command, str) else command


def mount_folders(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the folders to mount, without those inside another. The root is never mounted, because it would hide the image.

    Raises:
        ValueError: a path holds a character that the runtimes interpret.
    """
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if path.startswith("/")}):
        if path == "/" or any(path.startswith(outer + "/") for outer in found):
            continue
        if any(char in path for char in ',:"\\\n'):
            raise ValueError(path)
        found.append(path)
    return tuple(found)


def run_command(
    runtime: InstalledRuntime,
    what: ContainerSettings,
    task: str,
    command: tuple[str, ...] | str,
    variables: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the command line that runs a command in the image. It holds no variable's value: every user of the node can read it.

    Args:
        runtime: the program.
        what: the member's container settings.
        task: suffix of the container's name.
        command: words, or a text for a shell.
        variables: environment of the command besides the image's own; `around` and `variables_file` pass the values.
    """
    if runtime.kind is RuntimeKind.PODMAN:
        return _podman_run(runtime, what, task, shell_argv(command), variables)
    return _apptainer_exec(runtime, what, shell_argv(command))


def runtime_environment(
    runtime: InstalledRuntime, base: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the runtime's process: the node's, and the rank's variables in the form that passes them into the image.

    Variables that podman itself would interpret go into `variables_file` instead.
    """
    if runtime.kind is RuntimeKind.PODMAN:
        return {**base, **{name: value for name, value in variables.items() if not _read_by_runtime(name)}}
    prefix = "APPTAINERENV_" if runtime.kind is RuntimeKind.APPTAINER else "SINGULARITYENV_"
    return {**base, **{prefix + name: value for name, value in variables.items()}}


def variables_file(
    runtime: InstalledRuntime, what: ContainerSettings, task: str, variables: Mapping[str, str]
) -> tuple[str, bytes] | None:
    """Return path and content of the file that passes variables that podman itself would interpret; None without any.

    Raises:
        ValueError: a value does not fit into a line. The message names the variable and the remedy, not the value.
    """
    own = _own_variables(runtime, variables)
    if hidden := secret_names(variables).intersection(own):
        name = min(hidden)
        raise ValueError(
            f"secret {name} cannot be passed into an image: podman itself reads a variable of that name; use another name"
        )
    for name in own:
        line = f"{name}={variables[name]}".encode(errors="surrogateescape")
        if "\n" in variables[name] or "\r" in variables[name] or len(line) > _LINE_BYTES_MAX:
            why = f"must be one line of at most {_LINE_BYTES_MAX >> 10} KiB in an image, because podman itself reads a variable of that name"
            raise ValueError(f"env: {name} {why}; use another name, or a file")
    text = "".join(f"{name}={variables[name]}\n" for name in own)
    return (_path_of_variables(what, task), text.encode(errors="surrogateescape")) if own else None


def exec_command(
    runtime: InstalledRuntime, what: ContainerSettings, task: str, argv: Sequence[str], *, terminal: bool
) -> tuple[str, ...]:
    """Return the command line that runs another command beside a task, in its image."""
    if runtime.kind is RuntimeKind.PODMAN:
        return (
            runtime.path,
            "exec",
            "--interactive",
            *(["--tty"] if terminal else []),
            container_name(what, task),
            *argv,
        )
    return _apptainer_exec(runtime, what, tuple(argv))


def container_name(what: ContainerSettings, task: str) -> str:
    """Return the name of a task's container."""
    return f"{what.name}-{task}"


def resolve_image(runtime: InstalledRuntime, image: str, *, workdir: str, cache: str) -> tuple[str, str]:
    """Return the image as the runtime expects it, and the shell text that pulls it to this node; "" for an image file."""
    if is_image_file(image):
        return os.path.join(workdir, image), ""
    if runtime.kind is RuntimeKind.PODMAN:
        words = shlex.quote(image)
        program = shlex.quote(runtime.path)
        return image, f"{program} image exists {words} || {program} pull {words}"
    source = image if "://" in image else f"docker://{image}"
    file = os.path.join(cache, _file_name(source))
    words, fresh, lock = (shlex.quote(file + end) for end in ("", ".new", ".lock"))
    pull = f"{shlex.quote(runtime.path)} pull --force {fresh} {shlex.quote(source)} && mv {fresh} {words}"
    # The lock lets one of two jobs pull while the other waits: both would write the same file.
    return file, f"[ -e {words} ] || {{ flock 9 && {{ [ -e {words} ] || {{ {pull}; }}; }}; }} 9>{lock}"


def is_image_file(image: str) -> bool:
    """Whether the image is a file of the working directory, not a name in a registry."""
    return image.endswith(".sif")


def is_missing_image(output: str) -> bool:
    """Whether a failed pull, by its output, would fail on every node."""
    words = output.lower().replace(_NO_SUCH_PROGRAM, "")
    return any(word in words for word in _NO_SUCH_IMAGE)


def command_exit(code: int | None, signal: int | None) -> tuple[int | None, int | None]:
    """Return exit code and signal of the command, from those of the runtime's process."""
    if code is not None and _SIGNALS_FROM < code <= _SIGNALS_FROM + _SIGNALS_MAX:
        return None, code - _SIGNALS_FROM
    return code, signal


# ---- command lines --------------------------------------------------------------------------------------------------


def _podman_run(
    runtime: InstalledRuntime, what: ContainerSettings, task: str, argv: tuple[str, ...], variables: Mapping[str, str]
) -> tuple[str, ...]:
    own = _own_variables(runtime, variables)
    return (
        *podman_run_options(runtime, what, task),
        "--pull=never",
        f"--workdir={what.workdir}",
        *([f"--env-file={_path_of_variables(what, task)}"] if own else []),
        # By name, so that a value with several lines stays one value.
        *(f"--env={name}" for name in sorted(variables) if name not in own),
        what.image,
        *argv,
    )


def podman_run_options(runtime: InstalledRuntime, what: ContainerSettings, task: str) -> tuple[str, ...]:
    """Return `podman run` with the options of every container of a job: they keep it in the job's limits, account and folders.

    Source: podman-run(1), 4.3. Without a daemon and with `--cgroups=disabled` all processes stay below the keeper and in its cgroup.
    """
    # Root's containers run as root; for any other user a user namespace maps them to themselves, with their own groups.
    user = [f"--user={what.uid}:{what.gid}", *(["--userns=keep-id", "--group-add=keep-groups"] if what.uid else [])]
    return (
        runtime.path,
        "run",
        "--rm",
        f"--name={container_name(what, task)}",
        f"--label={OWNER_LABEL}={what.owner}",
        "--cgroups=disabled",
        "--network=host",
        "--ipc=host",
        "--http-proxy=false",
        "--log-driver=passthrough",
        "--security-opt=no-new-privileges",
        "--security-opt=label=disable",
        "--entrypoint=",
        *user,
        *([f"--init-path={runtime.init}", "--init"] if runtime.init else []),
        f"--ulimit=nofile={what.nofile[0]}:{what.nofile[1]}",
        f"--ulimit=nproc={what.processes[0]}:{what.processes[1]}",
        *(f"--mount=type=bind,source={path},target={path},bind-propagation=rslave" for path in what.mounts),
        *(f"--device=nvidia.com/gpu={uuid}" for uuid in what.gpus),
        *(f"--device={path}" for path in what.devices),
    )


def podman_remove_command(program: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the command that kills and removes containers; those that do not exist are no error."""
    return (program, "rm", "--force", "--time=0", "--ignore", *names)


def _apptainer_exec(runtime: InstalledRuntime, what: ContainerSettings, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Source: apptainer-exec(1), 1.2. It starts no daemon and no PID namespace; network and shared memory are the node's."""
    return (
        runtime.path,
        "exec",
        "--cleanenv",
        "--no-home",
        f"--pwd={what.workdir}",
        *(f"--bind={path}:{path}" for path in what.mounts),
        *(["--nv"] if what.gpus else []),
        what.image,
        *argv,
    )


def _file_name(source: str) -> str:
    """Return a unique file name for an image; the hash distinguishes `a/b-c` and `a/b_c`."""
    readable = "".join(char if char.isalnum() else "_" for char in source)[-_NAME_CHARACTERS:]
    return f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:16]}.sif"


def _path_of_variables(what: ContainerSettings, task: str) -> str:
    return os.path.join(what.folder, f"{task}.env")


def _own_variables(runtime: InstalledRuntime, variables: Mapping[str, str]) -> list[str]:
    """Return the variables that podman itself would interpret, sorted. Other runtimes get prefixed names, which cannot collide."""
    return sorted(filter(_read_by_runtime, variables)) if runtime.kind is RuntimeKind.PODMAN else []


def _read_by_runtime(name: str) -> bool:
    return name in _READ_BY_RUNTIME or name.startswith(_READ_BY_LOADER)
