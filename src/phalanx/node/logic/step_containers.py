"""Build the command that runs a task of a batch script in a container, from the options of Slurm's container plugin pyxis. Pure.

Unlike an `image` of a job (`images`), the container is the step's own: the script itself runs on the node, and each `srun` may name another image.
Source: pyxis 0.20, README and `srun --help`; apptainer-exec(1), 1.2; podman-run(1), 4.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from phalanx.core.errors import BadRequest
from phalanx.core.work.spec import JobSpec
from phalanx.node.logic.images import (
    ContainerSettings,
    InstalledRuntime,
    RuntimeKind,
    container_name,
    podman_remove_command,
    podman_run_options,
)

CONTAINER_OPTIONS: Final[Mapping[str, str]] = {
    "container-image": "the tasks run in this image",
    "container-mounts": "folders that they see, `SOURCE:TARGET:ro`",
    "container-workdir": "their folder in the image",
    "container-name": "accepted: each start is a new container",
    "container-env": "accepted: all variables are passed",
}
CONTAINER_FLAGS: Final[Mapping[str, str]] = {
    "container-mount-home": "they see the home folder",
    "no-container-mount-home": "the default",
    "container-writable": "changes to the image are lost at the end",
    "container-remap-root": "accepted: the user stays the same",
    "no-container-remap-root": "the default",
    "no-container-entrypoint": "the default",
    "container-entrypoint": "accepted: the command runs without the image's entry point",
}
STEP_RUNTIMES: Final = (RuntimeKind.APPTAINER, RuntimeKind.SINGULARITY, RuntimeKind.PODMAN)
"""Programs that can run images, in order of preference: the first two also run the squashfs files that pyxis users have."""
_REMOTE: Final = re.compile(r"(?:docker://)?(?:[^@/#]+@)?(?:([^#/]+)#)?(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContainers:
    """What a node offers to the steps of a script.

    Attributes:
        settings: of each container; its image is the step's.
        runtimes: the installed ones of STEP_RUNTIMES, in this order.
        unavailable: why a kind of runtime cannot be used here.
    """

    settings: ContainerSettings
    runtimes: tuple[InstalledRuntime, ...]
    unavailable: Mapping[str, str]

    @property
    def notes(self) -> str:
        """The folder with an empty file for each podman container that was started, under its name."""
        return f"{self.settings.folder}/step-containers"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return it from the values that `dataclasses.asdict` and JSON make of it."""
        settings: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one for name, one in values["settings"].items()
        }
        runtimes = tuple(InstalledRuntime(**{**one, "kind": RuntimeKind(one["kind"])}) for one in values["runtimes"])
        return cls(settings=ContainerSettings(**settings), runtimes=runtimes, unavailable=values["unavailable"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStart:
    """How a task starts. `container`: the name of its podman container, "" without one; `removal`: the command that kills and removes it."""

    argv: tuple[str, ...]
    container: str = ""
    removal: tuple[str, ...] = ()


def runs_images(spec: JobSpec) -> bool:
    """Whether a job's processes start containers: it has an image, or its batch script names one. Rootless podman needs privileges for it."""
    options = dict(spec.slurm)
    return bool(spec.image or options.get("container")) or (bool(options) and "--container-image" in spec.role.script)


def container_start(
    options: Mapping[str, str],
    offer: StepContainers,
    argv: Sequence[str],
    *,
    task: str,
    cwd: str,
    home: str,
    gpus: Sequence[str],
) -> ContainerStart:
    """Return how to start `argv` in the image of the options; without one, `argv` itself.

    The container has the account, limits, folders and devices of one of a job with an image. All variables are passed, and those of the image
    count more, as with pyxis.

    Args:
        options: those of pyxis, without `--`.
        offer: of the node.
        argv: the task's command.
        task: suffix of the container's name.
        cwd: the task's folder on the node.
        home: the user's home folder.
        gpus: UUIDs of the task's real devices.

    Raises:
        BadRequest: no runtime is installed, or it cannot run this image.
    """
    image = options.get("container-image", "")
    if not image:
        return ContainerStart(argv=tuple(argv))
    what = f"--container-image={image}"
    is_file = image.startswith(("/", ".")) or image.endswith((".sqsh", ".sif", ".squashfs"))
    usable = [one for one in offer.runtimes if not is_file or one.kind is not RuntimeKind.PODMAN]
    if not usable and offer.runtimes:
        raise BadRequest(f"{what}: podman runs images of a registry, not files", hint="install apptainer on the nodes")
    if not usable:
        raise BadRequest(
            f"{what}: this node has no apptainer, singularity or podman", hint="install one of them on the nodes"
        )
    runtime = usable[0]
    if why := offer.unavailable.get(runtime.kind):
        raise BadRequest(f"{what}: {why}")
    binds = _binds(options, home)
    targets = {bind.split(":")[1] for bind in binds}
    # The user's own mount counts more than ours of the same folder.
    mounts = tuple(path for path in offer.settings.mounts if path not in targets)
    settings = replace(offer.settings, mounts=mounts, gpus=tuple(gpus))
    mounted = any(cwd == folder or cwd.startswith(f"{folder}/") for folder in (*mounts, *targets))
    workdir = options.get("container-workdir", "") or (cwd if mounted else "")  # else the image's own
    if runtime.kind is RuntimeKind.PODMAN:
        return _podman(runtime, settings, _registry_name(image), binds, workdir, argv, task=task)
    path = image if image.startswith("/") else f"{cwd.rstrip('/')}/{image}"
    return ContainerStart(
        argv=(
            runtime.path,
            "exec",
            *(["--nv"] if gpus else []),
            *([] if "container-mount-home" in options else ["--no-home"]),
            *(["--writable-tmpfs"] if "container-writable" in options else []),
            *(word for bind in (*(f"{path}:{path}" for path in mounts), *binds) for word in ("--bind", bind)),
            *(["--pwd", workdir] if workdir else []),
            path if is_file else f"docker://{_registry_name(image)}",
            *argv,
        )
    )


def _binds(options: Mapping[str, str], home: str) -> list[str]:
    mounts = [mount for mount in options.get("container-mounts", "").split(",") if mount]
    binds = [mount.replace("+", ",") if ":" in mount else f"{mount}:{mount}" for mount in mounts]
    return [*binds, f"{home}:{home}"] if "container-mount-home" in options else binds


def _podman(
    runtime: InstalledRuntime,
    settings: ContainerSettings,
    image: str,
    binds: Sequence[str],
    workdir: str,
    argv: Sequence[str],
    *,
    task: str,
) -> ContainerStart:
    name = container_name(settings, task)
    return ContainerStart(
        argv=(
            *podman_run_options(runtime, settings, task),
            "--env-host",
            *(f"--volume={bind}" for bind in binds),
            *([f"--workdir={workdir}"] if workdir else []),
            _with_registry(image),
            *argv,
        ),
        container=name,
        removal=podman_remove_command(runtime.path, [name]),
    )


def _registry_name(image: str) -> str:
    """Return `registry/name:tag` of pyxis' `[docker://][user@][registry#]name[:tag]`."""
    match = _REMOTE.fullmatch(image)
    assert match is not None
    registry, name = match[1], match[2]
    return f"{registry}/{name}" if registry else name


def _with_registry(name: str) -> str:
    """Return an image's name with the registry that pyxis takes for one without: podman itself may have no default."""
    first, slash, _ = name.partition("/")
    return name if slash and (first == "localhost" or "." in first or ":" in first) else f"docker.io/{name}"
