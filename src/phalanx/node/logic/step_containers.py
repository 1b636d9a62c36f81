"""Build the command that runs a task of a batch script in a container, from the options of Slurm's container plugin pyxis. Pure.

Unlike an `image` of a job (`images`), the container is the step's own: the script itself runs on the node, and each `srun` may name another image.
Source: pyxis 0.20, README and `srun --help`; apptainer-exec(1), 1.2; podman-run(1), 4.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.core.errors import BadRequest

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
CONTAINER_RUNTIMES: Final = ("apptainer", "singularity", "podman")
"""Programs that can run images, in order of preference: the first also runs the squashfs files that pyxis users have."""
_REMOTE: Final = re.compile(r"(?:docker://)?(?:[^@/#]+@)?(?:([^#/]+)#)?(.+)")


def container_command(
    options: Mapping[str, str], runtimes: Mapping[str, str], argv: Sequence[str], *, folder: str, home: str, gpus: bool
) -> tuple[str, ...]:
    """Return the command that runs `argv` in the image of the options; `argv` itself without an image.

    Args:
        options: those of pyxis, without `--`.
        runtimes: installed programs by kind, of CONTAINER_RUNTIMES.
        argv: the task's command.
        folder: the task's folder on the node.
        home: the user's home folder.
        gpus: whether the task has real devices.

    Raises:
        BadRequest: no runtime is installed, or it cannot run this kind of image.
    """
    image = options.get("container-image", "")
    if not image:
        return tuple(argv)
    kind = next((one for one in CONTAINER_RUNTIMES if one in runtimes), "")
    if not kind:
        raise BadRequest(
            f"--container-image={image}: this node has no apptainer, singularity or podman",
            hint="install one of them on the nodes",
        )
    is_file = image.startswith(("/", ".")) or image.endswith((".sqsh", ".sif", ".squashfs"))
    path = image if image.startswith("/") else f"{folder.rstrip('/')}/{image}"
    mounts = [mount for mount in options.get("container-mounts", "").split(",") if mount]
    binds = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
    if "container-mount-home" in options:
        binds.append(f"{home}:{home}")
    workdir = options.get("container-workdir", "")
    if kind == "podman":
        if is_file:
            raise BadRequest(
                f"--container-image={image}: podman runs images of a registry, not files",
                hint="install apptainer on the nodes",
            )
        return _podman(runtimes[kind], _registry_name(image), binds, workdir, argv, gpus=gpus)
    return (
        runtimes[kind],
        "exec",
        *(["--nv"] if gpus else []),
        *([] if "container-mount-home" in options else ["--no-home"]),
        *(["--writable-tmpfs"] if "container-writable" in options else []),
        *(word for bind in binds for word in ("--bind", bind)),
        *(["--pwd", workdir] if workdir else []),
        path if is_file else f"docker://{_registry_name(image)}",
        *argv,
    )


def _podman(
    program: str, image: str, binds: Sequence[str], workdir: str, argv: Sequence[str], *, gpus: bool
) -> tuple[str, ...]:
    return (
        program,
        "run",
        "--rm",
        "--network=host",
        "--ipc=host",
        "--env-host",
        "--entrypoint=",
        *(["--device=nvidia.com/gpu=all"] if gpus else []),
        *(f"--volume={bind}" for bind in binds),
        *([f"--workdir={workdir}"] if workdir else []),
        image,
        *argv,
    )


def _registry_name(image: str) -> str:
    """Return `registry/name:tag` of pyxis' `[docker://][user@][registry#]name[:tag]`."""
    match = _REMOTE.fullmatch(image)
    assert match is not None
    registry, name = match[1], match[2]
    return f"{registry}/{name}" if registry else name
