"""Where a job runs and with what: its folder, image and environment, and where its checkpoints and outputs go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from phalanx.core.hints import Hint, HintCode
from phalanx.core.work.job_file.data_sources import OBJECT_STORES
from phalanx.core.work.job_file.key_values import PRINTABLE, read_key, read_text
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.requirements import NO_REQUIREMENTS
from phalanx.core.work.job_file.software import NO_SOFTWARE, Software, parse_software

_IMAGE: Final = re.compile(r"[A-Za-z0-9_./:@%+~-]{1,512}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def read_workdir(given: Mapping[str, object], workdir: str) -> str:
    """The absolute folder in which the tasks start; `workdir` is the base of a relative one."""
    path = read_text(given, "workdir").strip() or workdir
    full = path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"
    if not full.startswith("/") or "\0" in full:
        raise InvalidKey(f"workdir: {path!r} is not an absolute folder", key="workdir")
    return full


def read_upload(given: Mapping[str, object]) -> str:
    """The SHA-256, in hex, of the uploaded folder; empty for none."""
    digest = read_text(given, "upload").strip()
    if digest and not _SHA256.fullmatch(digest):
        raise InvalidKey(
            f"upload: {digest[:80]!r} is not a SHA-256 in hex",
            key="upload",
            hint=Hint(HintCode.UPLOAD_WORKDIR),
        )
    return digest


def read_image(given: Mapping[str, object]) -> str:
    """The container image; empty for none."""
    image = read_text(given, "image").strip()
    if image and (image.startswith("-") or not _IMAGE.fullmatch(image)):
        raise InvalidKey(
            f"image: {image[:80]!r} is not an image name",
            key="image",
            hint="docker.io/library/python:3.11, or FILE.sif",
        )
    for other in ("requirements", "software", "slurm"):
        if image and given.get(other) and given[other] != NO_REQUIREMENTS:
            raise InvalidKey(
                f"image and {other} cannot be combined",
                key="image",
                hint="batch scripts run on the node itself"
                if other == "slurm"
                else "build the packages into the image",
            )
    return image


def read_software(given: Mapping[str, object]) -> tuple[Software, str]:
    """The environment of the nodes, and the requirements file that `software` names."""
    none: tuple[Software, str] = (NO_SOFTWARE, "")
    found, listed = read_key(given, "software", parse_software, none)
    if (found.has_python or listed) and given.get("requirements", NO_REQUIREMENTS) not in {"", NO_REQUIREMENTS}:
        raise InvalidKey(
            "requirements and software cannot be combined", key="software", hint="an environment is used as it is"
        )
    return found, listed


def read_checkpoint(given: Mapping[str, object], workdir: str) -> str:
    """The folder or the place in an object store for checkpoints; empty for none. `workdir` is the base of a relative one."""
    place = read_text(given, "checkpoint").strip()
    scheme, separator, rest = place.partition("://")
    if separator and scheme in OBJECT_STORES:
        return _in_bucket("checkpoint", place)
    if separator and scheme != "file":
        raise InvalidKey(
            f"checkpoint: {scheme}:// is not supported",
            key="checkpoint",
            hint="name a folder that every node sees, or s3://bucket/folder, gs:// or az://",
        )
    path = rest if separator else place
    return path if not path or path.startswith("/") else f"{workdir.rstrip('/')}/{path}"


def read_outputs(given: Mapping[str, object]) -> str:
    """The place in an object store for outputs; empty for none."""
    place = read_text(given, "outputs").strip()
    if place and place.partition("://")[0] not in OBJECT_STORES:
        raise InvalidKey(
            f"outputs: {place[:80]!r} is not in an object store",
            key="outputs",
            hint="write s3://bucket/folder, gs:// or az://; without this key the head keeps them",
        )
    return _in_bucket("outputs", place) if place else ""


def _in_bucket(key: str, place: str) -> str:
    scheme, _, rest = place.partition("://")
    words = rest.rstrip("/").split("/")
    if "" in words or ".." in words or not PRINTABLE.fullmatch(rest) or "@" in words[0]:
        raise InvalidKey(f"{key}: {place[:80]!r} names no bucket and folder", key=key, hint=f"{scheme}://bucket/folder")
    return place.rstrip("/")
