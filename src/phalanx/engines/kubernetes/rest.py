"""A client of the Kubernetes API for the few kinds that the engine uses, on the standard library.

It keeps one connection a thread, limits its own rate, waits as `Retry-After` asks, and repeats what is safe to repeat. It knows no kind:
callers pass and get decoded JSON.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from phalanx import __version__
from phalanx.core.errors import NotSignedIn
from phalanx.engines.kubernetes.credentials import Credential, CredentialSource
from phalanx.engines.kubernetes.errors import KubernetesError, KubernetesUnreachable, error_of
from phalanx.engines.kubernetes.kubeconfig import ClusterAccess

FIELD_MANAGER: Final = "phalanx"
QPS: Final = 100.0  # requests/s; the default of client-go, 5, would take 25 s for a gang of 128 pods
BURST: Final = 200
ANSWER_S: Final = 10.0  # for an answer; the server itself ends a request after 60 s
CONNECT_S: Final = 5.0
RETRY_FOR_S: Final = 15.0  # as long as the engine may be busy with one request
RETRY_AFTER_MAX_S: Final = 10.0
PAGE: Final = 500  # objects of one list answer, as kubectl asks
BODY_MAX: Final = 64 << 20
_BROKEN: Final = (OSError, http.client.HTTPException)
_SAFE: Final = frozenset({"GET", "PUT", "DELETE", "PATCH"})
_FIRST_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ResourcePath:
    """One kind of objects: `group` is empty for the core group; `namespace` is empty for kinds without, or for all namespaces."""

    plural: str
    group: str = ""
    version: str = "v1"
    namespace: str = ""

    def url(self, name: str = "", part: str = "", query: Mapping[str, str] | None = None) -> str:
        """Return the path of the collection, of an object, or of a part of it such as `status`."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        words = [*(["namespaces", self.namespace] if self.namespace else []), self.plural, *filter(None, [name, part])]
        path = "/".join([root, *(quote(word, safe="") for word in words)])
        return f"{path}?{urlencode(query)}" if query else path


@dataclass(slots=True)
class RateLimit:
    """A token bucket. Safe to use in several threads.

    Args:
        per_s: requests a second.
        burst: requests at once after a pause.
        clock: returns monotonic seconds.
    """

    per_s: float
    burst: int
    clock: Callable[[], float] = time.monotonic
    _next_s: float = float("-inf")  # when the bucket would be empty of debts
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reserve_s(self) -> float:
        """Take one request out of the bucket, and return the seconds to wait before it."""
        with self._lock:
            now_s = self.clock()
            self._next_s = max(self._next_s, now_s - self.burst / self.per_s) + 1.0 / self.per_s
            return max(0.0, self._next_s - now_s)


@dataclass(slots=True)
class KubernetesApi:
    """The API server as one user. Safe to use in several threads; each has its own connection.

    Args:
        access: of the cluster.
        answer_s: for one answer.
        retry_for_s: after this time no more tries of one request begin.
        ended: set to give up waiting.
    """

    access: ClusterAccess
    answer_s: float = ANSWER_S
    retry_for_s: float = RETRY_FOR_S
    rate: RateLimit = field(default_factory=lambda: RateLimit(QPS, BURST))
    ended: threading.Event = field(default_factory=threading.Event)
    credentials: CredentialSource = field(init=False)
    _local: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        access = self.access
        fixed = Credential(token=access.token, certificate_pem=access.certificate_pem, key_pem=access.key_pem)
        self.credentials = CredentialSource(fixed, access.token_file, access.plugin)

    # ---- verbs ----------------------------------------------------------------------------------------------------------

    def get(self, path: ResourcePath, name: str) -> dict[str, Any]:
        """Return an object.

        Raises:
            KubernetesError: the server refuses it.
            KubernetesUnreachable: it does not answer.
        """
        return self.call("GET", path.url(name))

    def pages(
        self, path: ResourcePath, *, labels: str = "", fields: str = "", page: int = PAGE
    ) -> Iterator[tuple[list[dict[str, Any]], str]]:
        """List the objects in pages, each with the resource version of the list. Raises as `get` does; 410 if a page came too late."""
        query = {"limit": str(page), **_selectors(labels, fields)}
        while True:
            found = self.call("GET", path.url(query=query))
            about = found.get("metadata") or {}
            yield found.get("items") or [], str(about.get("resourceVersion") or "")
            if not about.get("continue"):
                return
            query["continue"] = str(about["continue"])

    def list(self, path: ResourcePath, *, labels: str = "", fields: str = "") -> Sequence[dict[str, Any]]:
        """List the objects. Raises as `get` does."""
        return [one for page, _ in self.pages(path, labels=labels, fields=fields) for one in page]

    def create(self, path: ResourcePath, item: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object. Raises as `get` does; 409 if it exists, also when an earlier try of this call created it."""
        return self.call("POST", path.url(query={"fieldManager": FIELD_MANAGER}), item)

    def would_create(self, path: ResourcePath, item: Mapping[str, Any]) -> None:
        """Let the server check the creation of an object, and create nothing. Raises as `create` does."""
        self.call("POST", path.url(query={"fieldManager": FIELD_MANAGER, "dryRun": "All"}), item)

    def replace(self, path: ResourcePath, name: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object. Raises as `get` does; 409 if its resource version is not the newest."""
        return self.call("PUT", path.url(name, query={"fieldManager": FIELD_MANAGER}), item)

    def apply(
        self,
        path: ResourcePath,
        name: str,
        item: Mapping[str, Any],
        *,
        force: bool = True,
        manager: str = FIELD_MANAGER,
    ) -> dict[str, Any]:
        """Apply an object on the server's side: the fields that it names become ours. Raises as `get` does; 409 unless `force`."""
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return self.call("PATCH", path.url(name, query=query), item, content="application/apply-patch+yaml")

    def patch(self, path: ResourcePath, name: str, change: Mapping[str, Any], *, part: str = "") -> dict[str, Any]:
        """Merge a change into an object or a part of it. Raises as `get` does."""
        url = path.url(name, part, {"fieldManager": FIELD_MANAGER})
        return self.call("PATCH", url, change, content="application/merge-patch+json")

    def post(self, path: ResourcePath, name: str, part: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """Create a part of an object, such as a binding or an eviction. Raises as `get` does."""
        return self.call("POST", path.url(name, part), item)

    def delete(self, path: ResourcePath, name: str, *, grace_s: int | None = None, uid: str = "") -> bool:
        """Delete an object, if it is there and, with `uid`, still the same one; return whether it was. Raises as `get` does."""
        try:
            self.call("DELETE", path.url(name), _delete_options(grace_s, uid))
        except KubernetesError as error:
            if error.is_absent or (uid and error.is_conflict):
                return False
            raise
        return True

    def delete_all(self, path: ResourcePath, *, labels: str, grace_s: int | None = None) -> None:
        """Delete all objects with these labels. Raises as `get` does."""
        if not labels:
            raise ValueError("labels are needed: without, every object of the namespace would go")
        self.call("DELETE", path.url(query={"labelSelector": labels}), _delete_options(grace_s, ""))

    # ---- requests -------------------------------------------------------------------------------------------------------

    def call(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, content: str = "application/json"
    ) -> dict[str, Any]:
        """Send a request until the server has answered it, and return the answer.

        A broken connection is tried again if the request is safe to repeat. An answer that asks to wait is, in any case.

        Raises:
            KubernetesError: the server refuses it.
            KubernetesUnreachable: it does not answer.
            NotSignedIn: there are no credentials, or the server does not accept them.
        """
        data = None if body is None else json.dumps(body).encode()
        until_s, pause_s, signed_again = time.monotonic() + self.retry_for_s, _FIRST_PAUSE_S, False
        while True:
            self._pause(self.rate.reserve_s())
            try:
                return self._once(method, url, data, content)
            except KubernetesError as error:
                if error.status == 401:
                    if signed_again or not self.credentials.changes:
                        raise NotSignedIn(
                            f"the API server at {self.access.server} does not accept the credentials"
                            + (f" of context {self.access.context}" if self.access.context else ""),
                            hint="kubectl auth whoami, or renew them as your cluster's documentation says",
                        ) from error
                    signed_again = True
                    self.credentials.forget()
                    self.close()
                    continue
                if not error.is_overload:
                    raise
                wait_s = min(RETRY_AFTER_MAX_S, max(pause_s, error.retry_after_s or 0.0))
                if time.monotonic() + wait_s > until_s:
                    raise
            except KubernetesUnreachable:
                wait_s = pause_s
                if method not in _SAFE or time.monotonic() + wait_s > until_s:
                    raise
            self._pause(wait_s)
            pause_s = min(2.0 * pause_s, RETRY_AFTER_MAX_S)

    def open_watch(self, url: str, silence_s: float) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Open a connection of its own for an answer without end. Raises as `call` does; the caller closes it.

        Args:
            url: path and query.
            silence_s: the connection breaks when no byte arrives for so long.
        """
        self._pause(self.rate.reserve_s())
        connection = self._connect(silence_s)
        try:
            connection.request("GET", url, headers=self._headers(""))
            answer = connection.getresponse()
            if answer.status != 200:
                raise error_of(answer.status, answer.read(BODY_MAX), answer.headers.get("Retry-After"))
        except _BROKEN as error:
            connection.close()
            raise self._unreachable(error) from error
        except BaseException:
            connection.close()
            raise
        return connection, answer

    def close(self) -> None:
        """Close this thread's connection; the next request opens another."""
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            connection.close()

    def _once(self, method: str, url: str, data: bytes | None, content: str) -> dict[str, Any]:
        connection, fresh = self._connection()
        headers = self._headers(content if data is not None else "")
        try:
            connection.request(method, url, body=data, headers=headers)
            answer = connection.getresponse()
        except _BROKEN as error:
            self.close()
            # The server has closed a connection that was idle: nothing was read, and a new one is tried at once.
            if not fresh and isinstance(error, (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
                return self._once(method, url, data, content)
            raise self._unreachable(error) from error
        try:
            payload = answer.read(BODY_MAX)
        except _BROKEN as error:
            self.close()
            raise self._unreachable(error) from error
        if answer.will_close:
            self.close()
        if answer.status >= 300:
            raise error_of(answer.status, payload, answer.headers.get("Retry-After"))
        try:
            found = json.loads(payload)
        except ValueError as error:
            raise self._unreachable(error) from error
        return found if isinstance(found, dict) else {}

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            return connection, False
        self._local.connection = connection = self._connect(self.answer_s)
        return connection, True

    def _connect(self, answer_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.access.server)
        host, default = parts.hostname or "", 443 if parts.scheme == "https" else 80
        try:
            opened = socket.create_connection((host, parts.port or default), timeout=CONNECT_S)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if parts.scheme == "https":
                opened = self._trust().wrap_socket(opened, server_hostname=self.access.server_name or host)
        except OSError as error:
            raise self._unreachable(error) from error
        opened.settimeout(answer_s)
        connection = http.client.HTTPConnection(host, parts.port or default, timeout=answer_s)
        connection.sock = opened
        connection.auto_open = 0
        return connection

    def _trust(self) -> ssl.SSLContext:
        access = self.access
        context = ssl.create_default_context(cadata=access.ca_pem or None)
        if access.insecure:  # as the kubeconfig says
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        credential = self.credentials.current()
        if credential.certificate_pem:
            # The library reads files only; this one exists in memory.
            with open(os.memfd_create("client-certificate"), "w", encoding="ascii") as file:
                file.write(credential.certificate_pem.rstrip("\n") + "\n" + credential.key_pem)
                file.flush()
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    def _headers(self, content: str) -> dict[str, str]:
        access, token = self.access, self.credentials.current().token
        headers = {"Accept": "application/json", "User-Agent": f"phalanx/{__version__}"}
        if content:
            headers["Content-Type"] = content
        if token:
            headers["Authorization"] = f"Bearer {token}"
        elif access.user:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{access.user}:{access.password}".encode()).decode()
        if access.impersonate:
            headers["Impersonate-User"] = access.impersonate
        return headers

    def _unreachable(self, error: Exception) -> KubernetesUnreachable:
        return KubernetesUnreachable(f"the API server at {self.access.server} does not answer: {_why(error)}")

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self.ended.wait(seconds):
            raise KubernetesUnreachable(
                f"the API server at {self.access.server} is not asked any more: the engine ends"
            )


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: value for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _delete_options(grace_s: int | None, uid: str) -> dict[str, Any]:
    options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    if uid:
        options["preconditions"] = {"uid": uid}
    return options


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
