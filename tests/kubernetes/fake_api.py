"""The fake API server: the HTTP side of `FakeStore`, with TLS, tokens, client certificates, roles, and faults that a test orders.

with fake_api(folder) as fake:
    ... fake.kubeconfig ...
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from phalanx.app.certificates import CertificateAuthority
from phalanx.app.state_folder import StateFolder
from tests.kubernetes.fake_store import KINDS, FakeStore, Item, Kind, Refused, matches

ADMIN_TOKEN = "admin-token-of-the-fake"
BOOKMARK_S = 1.0
OPTIONAL_GROUPS = ("kueue.x-k8s.io", "visibility.kueue.x-k8s.io", "resource.k8s.io")
ACCESS_REVIEW = ("authorization.k8s.io", "selfsubjectaccessreviews")


@dataclass
class FakeApi:
    """One fake cluster, which serves.

    Attributes:
        kubeconfig: of its admin.
        requests: method, path and user of each request so far.
        faults: called before each request with its method and path; one that raises `Refused`, or returns True to drop the connection.
        lost_answers: called after each request that was carried out; one that returns True drops the answer.
        torn: watches break in the middle of their next event.
        silent: watches send nothing more, while their connections stay open; nothing new is accepted.
        double_events: watches send each event twice.
        groups: API groups that are served beside Kubernetes' own, with their version.
        answers: of paths that no object stands for.
    """

    folder: str
    kubeconfig: str = ""
    store: FakeStore = field(default_factory=FakeStore)
    tokens: dict[str, str] = field(default_factory=lambda: {ADMIN_TOKEN: "admin"})
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    faults: list[Callable[[str, str], bool | None]] = field(default_factory=list)
    lost_answers: list[Callable[[str, str], bool]] = field(default_factory=list)
    torn: threading.Event = field(default_factory=threading.Event)
    watches_cut: int = 0
    silent: threading.Event = field(default_factory=threading.Event)
    away: threading.Event = field(default_factory=threading.Event)
    double_events: bool = False
    groups: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Item] = field(default_factory=dict)
    server: ThreadingHTTPServer | None = None
    ca_pem: str = ""

    @property
    def url(self) -> str:
        """Of the server."""
        assert self.server is not None
        return f"https://127.0.0.1:{self.server.server_address[1]}"

    def cut_watches(self) -> None:
        """End all watches now."""
        with self.store.lock:
            self.watches_cut += 1
            self.store.lock.notify_all()

    def write_kubeconfig(self, name: str, user: Item, *, namespace: str = "default", **cluster: Any) -> str:
        """Write a kubeconfig for a user; return its path."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": namespace}}],
            "clusters": [
                {
                    "name": "fake",
                    "cluster": {"server": self.url, "certificate-authority": f"{self.folder}/tls/ca.pem", **cluster},
                }
            ],
            "users": [{"name": "me", "user": user}],
        }
        path = os.path.join(self.folder, name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
        return path


@contextlib.contextmanager
def fake_api(folder: str) -> Iterator[FakeApi]:
    """Serve a fake cluster with the namespaces `default` and `kube-system`."""
    os.makedirs(folder, exist_ok=True)
    fake = FakeApi(folder=folder)
    authority = CertificateAuthority(StateFolder(path=folder))
    certificate, key = authority.write("api", authority.sign(["127.0.0.1"]))
    fake.ca_pem = authority.ca_pem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(cadata=authority.ca_pem)
    context.verify_mode = ssl.CERT_OPTIONAL

    class Handler(_Handler):
        api = fake

    server = _Server(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    fake.server = server
    for name in ("default", "kube-system"):
        fake.store.create(KINDS["", "namespaces"], "", {"metadata": {"name": name}})
    fake.kubeconfig = fake.write_kubeconfig("admin.kubeconfig", {"token": ADMIN_TOKEN})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        fake.cut_watches()
        server.close_all()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *given: Any) -> None:
        self.open: set[Any] = set()
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of a test go away as they like."""

    def close_all(self) -> None:
        """Close what idle clients keep open."""
        for request in list(self.open):
            with contextlib.suppress(OSError):
                request.shutdown(2)


class _Handler(BaseHTTPRequestHandler):
    api: FakeApi
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: Any) -> None:
        """Nothing: `FakeApi.requests` has them."""

    def _answer(self) -> None:
        api, size = self.api, int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        try:
            user = self._user()
            api.requests.append((self.command, self.path, user))
            if api.away.is_set():
                self.close_connection = True
                return
            for fault in list(api.faults):
                if fault(self.command, self.path):
                    self.close_connection = True
                    return
            self._route(user, body)
        except Refused as refused:
            self._send(refused.code, refused.status(), refused.headers)

    def _user(self) -> str:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        certificate = self.connection.getpeercert()
        user = self.api.tokens.get(token, "")
        if not user and certificate:
            user = next(value for part in certificate["subject"] for key, value in part if key == "commonName")
        if not user:
            raise Refused(401, "Unauthorized", "Unauthorized")
        acting = self.headers.get("Impersonate-User")
        if acting and user != "admin":
            raise Refused(
                403, "Forbidden", f'users "{acting}" is forbidden: User "{user}" cannot impersonate resource "users"'
            )
        return acting or user

    def _route(self, user: str, body: bytes) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        words = [urllib.parse.unquote(word) for word in url.path.strip("/").split("/")]
        if url.path in ("/readyz", "/livez"):
            self._send_bytes(200, b"ok", "text/plain")
            return
        if url.path == "/version":
            self._send(200, {"major": "1", "minor": "35", "gitVersion": "v1.35.0-fake"})
            return
        if url.path in self.api.answers:
            self._send(200, self.api.answers[url.path])
            return
        if words[0] == "apis" and words[1] in OPTIONAL_GROUPS and words[1] not in self.api.groups:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if words[0] == "apis" and len(words) == 2:
            self._send(200, {"kind": "APIGroup", "preferredVersion": {"version": self.api.groups.get(words[1], "v1")}})
            return
        group, words = ("", words[2:]) if words[0] == "api" else (words[1], words[3:])
        given = json.loads(body) if body else {}
        if (group, words[0]) == ACCESS_REVIEW:
            self._send(201, self._review(user, given))
            return
        # `/namespaces/NAME` itself is an object without a namespace.
        namespace, words = (words[1], words[2:]) if words[0] == "namespaces" and len(words) > 2 else ("", words)
        kind = KINDS.get((group, words[0]))
        if kind is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        name, part = ([*words, "", ""])[1:3]
        self._check_rights(user, kind, namespace, name, part, query)
        answer = self._verb(kind, namespace, name, part, query, given)
        if any(lost(self.command, self.path) for lost in list(self.api.lost_answers)):
            self.close_connection = True
        elif answer is not None:
            self._send(*answer)

    def _check_rights(self, user: str, kind: Kind, namespace: str, name: str, part: str, query: dict[str, str]) -> None:
        verb = {
            "GET": "watch" if query.get("watch") in ("true", "1") else "get" if name else "list",
            "POST": "create",
            "PUT": "update",
            "PATCH": "patch",
            "DELETE": "delete" if name else "deletecollection",
        }[self.command]
        if user == "admin" or self.api.store.allows(user, verb, kind, namespace, part):
            return
        where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
        what = f"{kind.plural}/{part}" if part else kind.plural
        of = f' "{name}"' if name else ""
        raise Refused(
            403,
            "Forbidden",
            f'{kind.told}{of} is forbidden: User "{user}" cannot {verb} resource "{what}" in API group "{kind.group}"{where}',
        )

    def _review(self, user: str, given: Item) -> Item:
        asked = given["spec"]["resourceAttributes"]
        kind = KINDS.get((asked.get("group", ""), asked["resource"])) or Kind(
            asked["resource"], "", asked.get("group", "")
        )
        allowed = user == "admin" or self.api.store.allows(
            user, asked["verb"], kind, asked.get("namespace", ""), asked.get("subresource", "")
        )
        return {**given, "status": {"allowed": allowed}}

    def _verb(
        self, kind: Kind, namespace: str, name: str, part: str, query: dict[str, str], given: Item
    ) -> tuple[int, Item] | None:
        store = self.api.store
        match self.command:
            case "GET" if name:
                return 200, store.get(kind, namespace, name)
            case "GET" if query.get("watch") in ("true", "1"):
                self._watch(kind, namespace, query)
                return None
            case "GET":
                return 200, self._list(kind, namespace, query)
            case "POST" if part == "binding":
                store.bind(namespace, name, given["target"]["name"])
                return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            case "POST":
                return 201, store.create(kind, namespace, given, query.get("fieldManager", ""), dry="dryRun" in query)
            case "PUT":
                return 200, store.replace(kind, namespace, name, given, part=part)
            case "PATCH":
                return self._patch(kind, namespace, name, part, query, given)
            case "DELETE" if name:
                return 200, store.delete(kind, namespace, name, given)
            case _:
                for item in store.select(
                    kind, namespace, query.get("labelSelector", ""), query.get("fieldSelector", "")
                )[0]:
                    with contextlib.suppress(Refused):
                        store.delete(kind, item["metadata"].get("namespace", ""), item["metadata"]["name"], given)
                return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _patch(
        self, kind: Kind, namespace: str, name: str, part: str, query: dict[str, str], given: Item
    ) -> tuple[int, Item]:
        content = (self.headers.get("Content-Type") or "").partition(";")[0]
        if content == "application/merge-patch+json":
            return 200, self.api.store.merge(kind, namespace, name, given, part=part)
        if content != "application/apply-patch+yaml":
            raise Refused(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content}")
        force = query.get("force") == "true"
        item, fresh = self.api.store.apply(kind, namespace, name, given, query.get("fieldManager", ""), force=force)
        return 201 if fresh else 200, item

    def _list(self, kind: Kind, namespace: str, query: dict[str, str]) -> Item:
        found, version = self.api.store.select(
            kind, namespace, query.get("labelSelector", ""), query.get("fieldSelector", "")
        )
        limit, after = int(query.get("limit") or 0), query.get("continue", "")
        if after:
            old, _, last = after.partition("|")
            if int(old) < self.api.store.compacted:
                raise Refused(410, "Expired", "The provided continue parameter is too old")
            version = int(old)
            found = [item for item in found if _key(item) > last]
        about: Item = {"resourceVersion": str(version)}
        if limit and len(found) > limit:
            about.update({"continue": f"{version}|{_key(found[limit - 1])}", "remainingItemCount": len(found) - limit})
            found = found[:limit]
        return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": about, "items": found}

    def _watch(self, kind: Kind, namespace: str, query: dict[str, str]) -> None:
        api, store = self.api, self.api.store
        version = int(query.get("resourceVersion") or 0)
        until_s = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
        labels, fields, cut = query.get("labelSelector", ""), query.get("fieldSelector", ""), api.watches_cut
        bookmarks, marked_s = query.get("allowWatchBookmarks") == "true", time.monotonic()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            try:
                events = store.events_after(version)
            except Refused as refused:
                self._event("ERROR", refused.status())
                break
            for event in events:
                version = event.version
                if (
                    api.silent.is_set()
                    or event.kind != kind
                    or namespace not in ("", event.item["metadata"].get("namespace", ""))
                ):
                    continue
                told = _seen(event.type, event.item, event.before, labels, fields)
                if told and api.torn.is_set():
                    self._chunk(json.dumps({"type": told, "object": event.item}).encode()[:40])
                    self.close_connection = True
                    return
                if told:
                    for _ in range(2 if api.double_events else 1):
                        self._event(told, event.item)
            if time.monotonic() >= until_s or api.watches_cut != cut or api.away.is_set():
                break
            if bookmarks and time.monotonic() - marked_s >= BOOKMARK_S and not api.silent.is_set():
                marked_s = time.monotonic()
                mark = {
                    "kind": kind.kind,
                    "apiVersion": kind.api_version,
                    "metadata": {"resourceVersion": str(version)},
                }
                self._event("BOOKMARK", mark)
            with store.lock:
                if store.version <= version and api.watches_cut == cut:
                    store.lock.wait(min(0.5, max(0.0, until_s - time.monotonic())))
        if api.silent.is_set():  # half closed: the client notices by its own clock
            while api.silent.is_set() and api.watches_cut == cut:
                time.sleep(0.02)
            self.close_connection = True
            return
        self._chunk(b"")

    def _event(self, kind: str, item: Item) -> None:
        self._chunk(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, code: int, item: Item, headers: dict[str, str] | None = None) -> None:
        self._send_bytes(code, json.dumps(item).encode(), "application/json", headers)

    def _send_bytes(self, code: int, data: bytes, content: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": content, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


for _verb in ("GET", "POST", "PUT", "PATCH", "DELETE"):
    setattr(_Handler, f"do_{_verb}", _Handler._answer)


def _key(item: Item) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


def _seen(event: str, item: Item, before: Item | None, labels: str, fields: str) -> str:
    """The type of an event as a watch with selectors sees it; empty if it does not."""
    now_in = event != "DELETED" and matches(item, labels, fields)
    was_in = before is not None and matches(before, labels, fields)
    if now_in:
        return "MODIFIED" if was_in else "ADDED"
    return "DELETED" if was_in else ""
