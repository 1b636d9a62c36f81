"""Bearer tokens and client certificates: fixed ones, those of a file that changes, and those that a program prints (exec plugins)."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import NotSignedIn

_FILE_S: Final = 60.0  # Kubernetes replaces the token of a service account each hour, at 80 % of its life
_PLUGIN_ANSWER_S: Final = 60.0  # a cloud's program may ask its metadata service
_EARLY_S: Final = 60.0  # before the end of a token, a new one is asked for
_LIFE_UNKNOWN_S: Final = 600.0  # of credentials without an end, until the program is asked again
_TEXT_MAX: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecPlugin:
    """A program that prints an ExecCredential. `install_hint`: what its kubeconfig says if it is not installed."""

    command: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_version: str = "client.authentication.k8s.io/v1"
    install_hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """What a request carries. Each part may be empty."""

    token: str = field(default="", repr=False)
    certificate_pem: str = field(default="", repr=False)
    key_pem: str = field(default="", repr=False)


@dataclass(slots=True)
class CredentialSource:
    """Returns the credential of the moment, and another after the server has refused it. Safe to use in several threads.

    Args:
        fixed: the parts that do not change.
        token_file: file with the token; empty for none.
        plugin: the program; None for none.
        clock: returns monotonic seconds.
        wall_clock: returns Unix seconds.
    """

    fixed: Credential
    token_file: str = ""
    plugin: ExecPlugin | None = None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    _found: Credential | None = None
    _until_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> Credential:
        """Return the credential.

        Raises:
            NotSignedIn: the file cannot be read, or the program fails.
        """
        with self._lock:
            if self._found is None or self.clock() >= self._until_s:
                self._found, life_s = self._ask()
                self._until_s = self.clock() + life_s
            return self._found

    def forget(self) -> None:
        """Ask again at the next request: the server has refused this credential."""
        with self._lock:
            self._found = None

    @property
    def changes(self) -> bool:
        """Whether another try may bring another credential."""
        return bool(self.token_file) or self.plugin is not None

    def _ask(self) -> tuple[Credential, float]:
        if self.plugin is not None:
            return run_plugin(self.plugin, self.wall_clock())
        if self.token_file and not self.fixed.token:
            try:
                with open(self.token_file, encoding="ascii") as file:
                    token = file.read().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise NotSignedIn(f"cannot read the token of the cluster in {self.token_file}: {error}") from error
            fixed = self.fixed
            return Credential(token=token, certificate_pem=fixed.certificate_pem, key_pem=fixed.key_pem), _FILE_S
        return self.fixed, float("inf")


def run_plugin(plugin: ExecPlugin, now_s: float) -> tuple[Credential, float]:
    """Run the program; return its credential, and for how many seconds it is valid.

    Raises:
        NotSignedIn: it is not installed, fails, or prints no credential.
    """
    request = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
    environment = {**os.environ, **plugin.variables, "KUBERNETES_EXEC_INFO": json.dumps(request)}
    try:
        done = subprocess.run(
            [plugin.command, *plugin.arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PLUGIN_ANSWER_S,
            env=environment,
            check=False,
        )
    except OSError as error:
        raise NotSignedIn(
            f"the kubeconfig's program {plugin.command} cannot be started: {error.strerror}", hint=plugin.install_hint
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NotSignedIn(
            f"the kubeconfig's program {plugin.command} did not answer in {_PLUGIN_ANSWER_S:.0f} s"
        ) from error
    if done.returncode != 0:
        # Its output may hold a token; only what it writes for people is shown.
        why = " ".join(done.stderr.decode(errors="replace").split())[-_TEXT_MAX:]
        raise NotSignedIn(f"the kubeconfig's program {plugin.command} failed with code {done.returncode}: {why}")
    try:
        status = json.loads(done.stdout)["status"]
        found = Credential(
            token=str(status.get("token") or ""),
            certificate_pem=str(status.get("clientCertificateData") or ""),
            key_pem=str(status.get("clientKeyData") or ""),
        )
        until = status.get("expirationTimestamp")
        left_s = _LIFE_UNKNOWN_S if not until else datetime.datetime.fromisoformat(str(until)).timestamp() - now_s
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotSignedIn(f"the kubeconfig's program {plugin.command} printed no ExecCredential") from None
    if not (found.token or found.certificate_pem):
        raise NotSignedIn(f"the kubeconfig's program {plugin.command} printed neither a token nor a certificate")
    return found, max(0.0, left_s - _EARLY_S)
