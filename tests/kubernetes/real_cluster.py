"""A Kubernetes 1.20.2 on this machine alone: etcd, API server, scheduler, controller manager, and a stand-in kubelet for each node. Root.

    with RealCluster(nodes={"n0": 8, "n1": 8}) as cluster:
        cluster.kubectl("get", "nodes")

Everything is in one folder and on loopback, and ends with this process. In a lab, the servers run on its host h0 and each node on the host
of its name, so that cables can be cut. `make kubernetes-tools` builds the programs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from benchmarks.cluster import ROOT, free_port, wait_until
from tests.lab.lab import Lab

VERSION: Final = "1.20.2"
TOOLS: Final = os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "phalanx", f"kubernetes-{VERSION}"
)
USERS: Final = {"admin": "system:masters", "kubelet": "system:masters", "ada": "", "bob": ""}
HOST: Final = "127.0.0.1"


def why_not() -> str:
    """One line that says what is missing; empty where it can run."""
    if os.geteuid() != 0:
        return "the stand-in kubelet mounts, which needs root here"
    if not os.path.exists(os.path.join(TOOLS, "ready")):
        return "Kubernetes is not built here: run make kubernetes-tools"
    return ""


@dataclass(slots=True, kw_only=True)
class RealCluster:
    """One cluster. Use as a context: leaving it ends its processes, and so does the death of this process.

    Attributes:
        nodes: the GPUs of each node by its name; nodes can be added later (`start_node`).
        shared: folders of this machine that all pods share.
        lab: of which h0 and the hosts that are named as the nodes are used; None: this machine's loopback.
        claims: folder of the volumes of all claims; one in `folder` by default.
        names: pods that a headless Service names find each other, as by DNS.
        image: variables that all images set.
        audited: the API server writes each request to `audit.log` in the folder.
        folder: of its files; made and removed by the context.
    """

    nodes: Mapping[str, int] = field(default_factory=dict)
    shared: Sequence[str] = (ROOT,)
    lab: Lab | None = None
    audited: bool = False
    claims: str = ""
    names: bool = False
    image: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    port: int = 0
    _etcd_port: int = 0
    _tokens: dict[str, str] = field(default_factory=dict)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    # PR_SET_PDEATHSIG is about the thread that forked: what a short thread started could die with it.
    _starter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "real-cluster"))

    def __enter__(self) -> Self:
        self.folder = tempfile.mkdtemp(prefix="run-", dir=TOOLS)  # hosts of a lab see it, unlike /tmp
        try:
            self._prepare()
            self.start_etcd()
            self.start_api()
            for program in ("kube-controller-manager", "kube-scheduler"):
                self._start_manager(program)
            for name, gpus in self.nodes.items():
                self.start_node(name, gpus)
            wait_until(lambda: self._ready_nodes() >= set(self.nodes), "all nodes are ready", limit_s=60.0)
            wait_until(
                lambda: self.get("/api/v1/namespaces/default/serviceaccounts/default")[0] == 200,
                "namespaces have accounts",
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in [*(one for one in self._running if one.startswith("node-")), *reversed(list(self._running))]:
            self._kill(name)
        self._starter.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """Of the API server."""
        return self.lab.host("h0").address if self.lab else HOST

    def kubeconfig(self, user: str = "admin", namespace: str = "default") -> str:
        """The path of a kubeconfig for a user: admin may do all, ada and bob nothing until a role is bound to them."""
        with open(os.path.join(self.folder, "api", "apiserver.crt"), "rb") as file:
            trust = base64.b64encode(file.read()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": user,
            "clusters": [
                {
                    "name": "here",
                    "cluster": {"server": f"https://{self.address}:{self.port}", "certificate-authority-data": trust},
                }
            ],
            "users": [{"name": user, "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": user, "context": {"cluster": "here", "user": user, "namespace": namespace}}],
        }
        path = os.path.join(self.folder, f"kubeconfig-{user}-{namespace}")
        with open(path, "w", encoding="utf-8") as out:
            json.dump(config, out)
        os.chmod(path, 0o600)
        return path

    def kubectl(self, *words: str, stdin: str | None = None, user: str = "admin", check: bool = True) -> str:
        """What Debian's kubectl prints.

        Raises:
            RuntimeError: it failed, with what it printed, and `check`.
        """
        argv = [
            self._program("kubectl"),
            f"--kubeconfig={self.kubeconfig(user)}",
            f"--cache-dir={self.folder}/kubectl",
            *words,
        ]
        done = subprocess.run(
            self._on("h0", argv), input=stdin, capture_output=True, text=True, timeout=120, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout + (done.stderr if not check else "")

    def get(self, path: str) -> tuple[int, Any]:
        """The status and the answer of a GET as admin; 0 if the server is away."""
        return self.lab.inside("h0", lambda: self._get(path)) if self.lab else self._get(path)

    def _get(self, path: str) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"https://{self.address}:{self.port}{path}", headers={"Authorization": f"Bearer {self._tokens['admin']}"}
        )
        try:
            context = ssl.create_default_context(cafile=os.path.join(self.folder, "api", "apiserver.crt"))
            with urllib.request.urlopen(request, timeout=10, context=context) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, None
        except (OSError, ValueError):
            return 0, None

    def start_api(self) -> None:
        """Start the API server and wait until it answers."""
        flags = {
            "etcd-servers": f"http://{HOST}:{self._etcd_port}",
            "bind-address": self.address,
            "advertise-address": self.address if self.lab else "192.0.2.1",
            "secure-port": str(self.port),
            "cert-dir": os.path.join(self.folder, "api"),
            "token-auth-file": os.path.join(self.folder, "tokens.csv"),
            "authorization-mode": "RBAC",
            "service-cluster-ip-range": "10.0.0.0/24",
            "endpoint-reconciler-type": "none",
            "service-account-issuer": "https://kubernetes.default.svc",
            "api-audiences": "https://kubernetes.default.svc",
            "service-account-key-file": self._account_key,
            "service-account-signing-key-file": self._account_key,
            "kubelet-preferred-address-types": "InternalIP",
            "profiling": "false",
            **self._audit_flags(),
        }
        self._start(
            "kube-apiserver", [self._program("kube-apiserver"), *(f"--{key}={value}" for key, value in flags.items())]
        )
        wait_until(
            lambda: self.get("/api/v1/namespaces/kube-system")[0] == 200, "the API server answers", limit_s=120.0
        )

    def _audit_flags(self) -> dict[str, str]:
        if not self.audited:
            return {}
        policy = os.path.join(self.folder, "audit-policy.yaml")
        with open(policy, "w", encoding="utf-8") as out:
            rules = {"omitStages": ["RequestReceived"], "rules": [{"level": "Metadata"}]}
            json.dump({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", **rules}, out)
        return {"audit-policy-file": policy, "audit-log-path": os.path.join(self.folder, "audit.log")}

    def stop_api(self) -> None:
        """Kill the API server: it is away until `start_api`."""
        self._kill("kube-apiserver")

    def start_etcd(self) -> None:
        """Start the database."""
        urls = f"http://{HOST}:{self._etcd_port}"
        argv = [
            self._program("etcd"),
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={urls}",
            f"--advertise-client-urls={urls}",
            f"--listen-peer-urls=http://{HOST}:{free_port()}",
            "--log-level=error",
            "--logger=zap",
        ]
        self._start("etcd", argv)

    def compact(self) -> None:
        """Drop the history of the database: a watch from an old version gets 410 Gone."""
        revision = self._etcd("/v3/kv/range", {"key": base64.b64encode(b"\0").decode()})["header"]["revision"]
        self._etcd("/v3/kv/compaction", {"revision": revision, "physical": True})

    def start_node(self, name: str, gpus: int, labels: Mapping[str, str] | None = None) -> None:
        """Add a node, or start a dead one again."""
        folder = os.path.join(self.folder, "nodes", name)
        shared = [word for path in self.shared for word in ("--shared", path)]
        marks = [word for pair in (labels or {}).items() for word in ("--label", "=".join(pair))]
        marks += [word for pair in self.image.items() for word in ("--image", "=".join(pair))]
        marks += ["--names"] if self.names else []
        argv = [
            sys.executable,
            "-m",
            "tests.kubernetes.kubelet",
            "--address",
            self.lab.host(name).address if self.lab else HOST,
            "--kubeconfig",
            self.kubeconfig("kubelet"),
            "--name",
            name,
            "--gpus",
            str(gpus),
            "--folder",
            folder,
            "--claims",
            self.claims or os.path.join(self.folder, "claims"),
            *shared,
            *marks,
            "--certificate",
            os.path.join(self.folder, "api", "apiserver.crt"),
            "--key",
            os.path.join(self.folder, "api", "apiserver.key"),
        ]
        self._start(f"node-{name}", argv, host=name)

    def kill_node(self, name: str) -> None:
        """End a node as a power cut does: all processes of its pods at once, and nothing is reported."""
        self._kill(f"node-{name}")

    def node_pid(self, name: str) -> int:
        """The process of a node's kubelet, on a cluster without a lab."""
        return self._running[f"node-{name}"].pid

    @contextlib.contextmanager
    def without_scheduler(self) -> Iterator[None]:
        """No pod is placed meanwhile."""
        self._kill("kube-scheduler")
        try:
            yield
        finally:
            self._start_manager("kube-scheduler")

    def log(self, name: str) -> str:
        """What a process of the cluster printed: `etcd`, `kube-apiserver`, ..., `node-NAME`."""
        with open(os.path.join(self.folder, f"{name}.log"), encoding="utf-8", errors="replace") as file:
            return file.read()

    @property
    def _account_key(self) -> str:
        return os.path.join(self.folder, "accounts.key")

    def _prepare(self) -> None:
        self.port, self._etcd_port = free_port(), free_port()
        self._tokens = {user: secrets.token_hex(16) for user in USERS}
        with open(os.path.join(self.folder, "tokens.csv"), "w", encoding="utf-8") as out:
            out.writelines(f'{token},{user},{user},"{USERS[user]}"\n' for user, token in self._tokens.items())
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        plain = serialization.NoEncryption()
        with open(self._account_key, "wb") as file:
            file.write(
                key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
            )

    def _start_manager(self, program: str) -> None:
        flags = {
            "kubeconfig": self.kubeconfig("admin"),
            "leader-elect": "false",
            "secure-port": "0",
            "port": "0",
            "profiling": "false",
        }
        if program == "kube-controller-manager":
            flags |= {
                "service-account-private-key-file": self._account_key,
                "root-ca-file": os.path.join(self.folder, "api", "apiserver.crt"),
            }
        self._start(program, [self._program(program), *(f"--{key}={value}" for key, value in flags.items())])

    def _program(self, name: str) -> str:
        return os.path.join(TOOLS, "bin", name)

    def _on(self, host: str, argv: Sequence[str]) -> list[str]:
        return self.lab.command(host, argv) if self.lab else list(argv)

    def _start(self, name: str, argv: Sequence[str], *, host: str = "h0") -> None:
        with open(os.path.join(self.folder, f"{name}.log"), "ab") as log:
            command = ["setpriv", "--pdeathsig", "KILL", "--", *self._on(host, argv)]
            nothing = subprocess.DEVNULL

            def begin() -> subprocess.Popen[bytes]:
                return subprocess.Popen(command, stdin=nothing, stdout=log, stderr=log, cwd=ROOT)

            self._running[name] = self._starter.submit(begin).result()

    def _kill(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def _ready_nodes(self) -> set[str]:
        _, answer = self.get("/api/v1/nodes")
        return {
            node["metadata"]["name"]
            for node in (answer or {}).get("items", ())
            if any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions", ()))
        }

    def _etcd(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(f"http://{HOST}:{self._etcd_port}{path}", data=json.dumps(body).encode())

        def ask() -> Any:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return json.load(reply)

        return self.lab.inside("h0", ask) if self.lab else ask()
