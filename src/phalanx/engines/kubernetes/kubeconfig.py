"""Reads how to reach a cluster: from kubeconfig files with their contexts, or from a pod's own service account.

The files are those of `kubectl`: `KUBECONFIG` (several, the first that defines a name wins), else `~/.kube/config`, else the service
account that Kubernetes mounts into a pod. Tokens and keys stay in memory.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from phalanx.core.errors import BadFile, BadRequest
from phalanx.engines.kubernetes.credentials import ExecPlugin

SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_BYTES_MAX: Final = 4 << 20  # an organisation's file with hundreds of clusters and their certificates
_DEFAULT: Final = os.path.join("~", ".kube", "config")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """How to reach one API server, and as whom.

    Attributes:
        context: its name in the kubeconfig; empty in a pod.
        server: URL of the API server.
        namespace: that of the context, else "default".
        ca_pem: CA of the server; empty for those of the system.
        insecure: the kubeconfig says not to verify the server.
        server_name: the name in its certificate, if it is not that of the URL.
        certificate_pem, key_pem: of the client; empty for none.
        token: bearer token; empty for none.
        token_file: file with it, which is read again as it changes.
        plugin: program that prints credentials; None for none.
        user, password: for basic authentication.
        impersonate: act as this user; empty for the own one.
    """

    context: str
    server: str
    namespace: str = "default"
    ca_pem: str = ""
    insecure: bool = False
    server_name: str = ""
    certificate_pem: str = field(default="", repr=False)
    key_pem: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    token_file: str = ""
    plugin: ExecPlugin | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    impersonate: str = ""


def find_access(context: str, environment: Mapping[str, str]) -> ClusterAccess:
    """Return the access for a context; "" for the current one, or for the service account of this pod.

    Raises:
        BadFile: a kubeconfig cannot be read or is malformed.
        BadRequest: there is no kubeconfig, or no such context.
    """
    named = [path for path in environment.get("KUBECONFIG", "").split(":") if path]
    paths = named or [os.path.expanduser(_DEFAULT)]
    present = [path for path in paths if os.path.exists(path)]
    if present:
        return _from_files(present, context)
    if "KUBERNETES_SERVICE_HOST" in environment and not context:
        return service_account_access(environment)
    where = ", ".join(paths)
    raise BadRequest(
        f"no kubeconfig at {where}",
        hint="set KUBECONFIG to the file that kubectl uses for the cluster (see docs/kubernetes.md)",
    )


def service_account_access(environment: Mapping[str, str], folder: str = SERVICE_ACCOUNT) -> ClusterAccess:
    """Return the access of the pod in which this process runs.

    Raises:
        BadFile: its service account is not mounted.
    """
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    return ClusterAccess(
        context="",
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=_read(os.path.join(folder, "namespace")).strip() or "default",
        ca_pem=_read(os.path.join(folder, "ca.crt")),
        token_file=os.path.join(folder, "token"),
    )


def _from_files(paths: Sequence[str], context: str) -> ClusterAccess:
    """Merge the files as kubectl does: the first that defines a name, or the current context, wins."""
    tables: dict[str, dict[str, tuple[dict[str, Any], str]]] = {"contexts": {}, "clusters": {}, "users": {}}
    current = ""
    for path in paths:
        document = _parse(path)
        current = current or str(document.get("current-context") or "")
        for kind, table in tables.items():
            for entry in _entries(document, kind, path):
                table.setdefault(str(entry["name"]), (entry.get(kind[:-1]) or {}, path))
    wanted = context or current
    known = ", ".join(sorted(tables["contexts"])) or "none"
    if not wanted:
        raise BadRequest(f"{paths[0]} has no current context", hint=f"choose one of its contexts: {known}")
    if wanted not in tables["contexts"]:
        raise BadRequest(f"the kubeconfig has no context {wanted}", hint=f"its contexts: {known}")
    chosen, path = tables["contexts"][wanted]
    cluster, cluster_path = _named(tables["clusters"], chosen, "cluster", wanted, path)
    user, user_path = _named(tables["users"], chosen, "user", wanted, path) if chosen.get("user") else ({}, path)
    return _access(wanted, str(chosen.get("namespace") or "default"), cluster, cluster_path, user, user_path)


def _named(
    table: Mapping[str, tuple[dict[str, Any], str]], chosen: Mapping[str, Any], kind: str, context: str, path: str
) -> tuple[dict[str, Any], str]:
    name = str(chosen.get(kind) or "")
    if name not in table:
        raise BadFile(f"{path}: context {context} names the {kind} {name or '(none)'}, which is not defined")
    return table[name]


def _access(
    context: str, namespace: str, cluster: Mapping[str, Any], cluster_path: str, user: Mapping[str, Any], user_path: str
) -> ClusterAccess:
    server = str(cluster.get("server") or "").rstrip("/")
    parts = urlsplit(server)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise BadFile(f"{cluster_path}: the server of context {context} is no URL: {server[:100] or '(none)'}")
    if cluster.get("proxy-url"):
        raise BadFile(f"{cluster_path}: context {context} has a proxy-url, which is not supported")
    if user.get("as-groups") or user.get("as-user-extra"):
        raise BadFile(f"{user_path}: context {context} impersonates groups, which is not supported")
    plugin = user.get("exec")
    if user.get("auth-provider"):
        raise BadFile(
            f"{user_path}: context {context} uses an auth-provider, which Kubernetes has removed",
            hint="use the exec plugin of your cloud instead",
        )
    return ClusterAccess(
        context=context,
        server=server,
        namespace=namespace,
        ca_pem=_pem(cluster, "certificate-authority", cluster_path),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        server_name=str(cluster.get("tls-server-name") or ""),
        certificate_pem=_pem(user, "client-certificate", user_path),
        key_pem=_pem(user, "client-key", user_path),
        token=str(user.get("token") or ""),
        token_file=_beside(str(user.get("tokenFile") or ""), user_path),
        plugin=None if not plugin else _plugin(plugin, user_path),
        user=str(user.get("username") or ""),
        password=str(user.get("password") or ""),
        impersonate=str(user.get("as") or ""),
    )


def _plugin(entry: Mapping[str, Any], path: str) -> ExecPlugin:
    command = str(entry.get("command") or "")
    version = str(entry.get("apiVersion") or "")
    if not command or not version.startswith("client.authentication.k8s.io/"):
        raise BadFile(
            f"{path}: an exec plugin needs a command, and an apiVersion client.authentication.k8s.io/v1 or v1beta1"
        )
    variables = {str(one["name"]): str(one.get("value") or "") for one in entry.get("env") or () if one.get("name")}
    return ExecPlugin(
        # As kubectl: a command with a slash is relative to its file, any other is found on the PATH.
        command=_beside(command, path) if "/" in command else command,
        arguments=tuple(str(word) for word in entry.get("args") or ()),
        variables=variables,
        api_version=version,
        install_hint=" ".join(str(entry.get("installHint") or "").split())[:300],
    )


def _pem(table: Mapping[str, Any], key: str, path: str) -> str:
    """Return a PEM text that stands in the file as base64, or in a file beside it; the former wins."""
    inside = table.get(f"{key}-data")
    if inside:
        try:
            return base64.b64decode(str(inside), validate=True).decode("ascii")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise BadFile(f"{path}: {key}-data is not base64 of a PEM text") from error
    named = str(table.get(key) or "")
    return _read(_beside(named, path)) if named else ""


def _beside(name: str, path: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(path)), name) if name else ""


def _entries(document: Mapping[str, Any], kind: str, path: str) -> list[dict[str, Any]]:
    found = document.get(kind) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) and one.get("name") for one in found):
        raise BadFile(f"{path}: {kind} is not a list of entries with names")
    if not all(isinstance(one.get(kind[:-1]) or {}, dict) for one in found):
        raise BadFile(f"{path}: an entry of {kind} has no keys")
    return found


def _parse(path: str) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    text = _read(path)
    try:
        found = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, RecursionError) as error:
        raise BadFile(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict):
        raise BadFile(f"{path} is no kubeconfig: it has no keys")
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > _BYTES_MAX:
        raise BadFile(f"{path} is larger than {_BYTES_MAX >> 20} MiB")
    return text
