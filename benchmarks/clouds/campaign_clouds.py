"""The clouds of a campaign: the server process of each, what the head's environment has for it, and the terms of its pools."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.clouds import azure_dialect, google_dialect
from benchmarks.cluster import free_port

ROOT: Final = Path(__file__).parents[2]
MOTO: Final = ROOT / "build" / "moto" / "bin" / "python"
IMAGE: Final = "ami-12c6146b"  # one that moto has
BEGIN_S: Final = 120.0  # a guard: until a server answers


@dataclass(slots=True)
class CampaignCloud:
    """One cloud.

    Attributes:
        module: of its server; `python`: that runs it.
        node, zones, settings: of its pools.
        environment: what the head needs to reach it.
        share: of all creates.
    """

    name: str
    port: int
    module: str
    python: str
    words: tuple[str, ...]
    node: str
    settings: dict[str, str]
    environment: dict[str, str]
    zones: tuple[str, ...] = ()
    share: float = 1.0
    server: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def begin(self, seed: int, faults: float, output: IO[bytes]) -> None:
        """Start the server, and wait until it answers."""
        words = [self.python, "-m", self.module, "--port", str(self.port), "--seed", str(seed)]
        words += ["--faults", str(faults), *self.words]
        self.server = subprocess.Popen(words, stdout=output, stderr=output, cwd=ROOT)
        until_s = time.monotonic() + BEGIN_S
        while True:
            try:
                self.ask("count")
            except OSError:
                if time.monotonic() > until_s or self.server.poll() is not None:
                    raise SystemExit(f"the server of cloud {self.name} did not start") from None
                time.sleep(0.1)
            else:
                return

    def ask(self, word: str) -> dict[str, Any]:
        """Ask the cloud itself: `list`, `count` or `calm`."""
        with urllib.request.urlopen(f"{self.url}/cloud/{word}", timeout=60) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def end(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.kill()
            self.server.wait()


def _aws(folder: Path, port: int) -> CampaignCloud:
    if not MOTO.exists():
        raise SystemExit("moto is not installed: make s3-tools")
    del folder
    return CampaignCloud(
        name="aws",
        port=port,
        module="benchmarks.clouds.moto_cloud",
        python=str(MOTO),
        words=(),
        node="g4dn.xlarge",
        settings={"region": "us-east-1", "image": IMAGE, "endpoint": f"http://127.0.0.1:{port}"},
        environment={
            "AWS_ACCESS_KEY_ID": "campaign",
            "AWS_SECRET_ACCESS_KEY": "campaign",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        },
    )


def _dialect(name: str, port: int, **words: Any) -> CampaignCloud:
    module, python = "benchmarks.clouds.dialect_server", sys.executable
    return CampaignCloud(name=name, port=port, module=module, python=python, words=("--dialect", name), **words)


def _google(folder: Path, port: int) -> CampaignCloud:
    from tests.cloud_rigs import google_environment, write_google_key

    project = google_dialect.PROJECT
    return _dialect(
        "google",
        port,
        node="g2-standard-4",
        zones=google_dialect.ZONES,
        settings={"project": project, "image": f"projects/{project}/global/images/node"},
        environment=google_environment(write_google_key(folder / "google.json", port), port),
    )


def _azure(folder: Path, port: int) -> CampaignCloud:
    from tests.cloud_rigs import AZURE_SETTINGS, azure_environment

    del folder
    return _dialect(
        "azure",
        port,
        node=next(iter(azure_dialect.SIZES)),
        zones=("1", "2"),
        settings=AZURE_SETTINGS,
        environment=azure_environment(port),
    )


MAKERS: Final[dict[str, Callable[[Path, int], CampaignCloud]]] = {"aws": _aws, "google": _google, "azure": _azure}


def make_clouds(shares: Mapping[str, float], folder: Path) -> list[CampaignCloud]:
    """Return the clouds of these names, with the weights of their shares; none is started yet."""
    clouds = [MAKERS[name](folder, free_port()) for name in shares]
    for cloud in clouds:
        cloud.share = shares[cloud.name] / sum(shares.values())
    return clouds
