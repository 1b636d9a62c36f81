"""The clusters on which the contract of client and API runs: the fake, and a real API server where it is built."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.kubernetes.fake_api import fake_api

KUBECONFIG = "PHALANX_TEST_KUBECONFIG"  # of an admin of a cluster to use in place of the built one


def why_no_real() -> str:
    """Why no real API server can be tested here; empty if one can."""
    if os.environ.get(KUBECONFIG):
        return ""
    if importlib.util.find_spec("tests.kubernetes.real_cluster") is None:
        return "no real API server: make kubernetes-tools"
    why: str = importlib.import_module("tests.kubernetes.real_cluster").why_not()
    return why


@dataclass(frozen=True)
class TestedCluster:
    """A cluster of which a test may do anything.

    Attributes:
        kubeconfig: of an admin.
        compact: makes the server forget all changes so far; None where that cannot be ordered.
    """

    kubeconfig: str
    compact: Callable[[], None] | None = None


@contextlib.contextmanager
def cluster(name: str) -> Iterator[TestedCluster]:
    """Run the cluster."""
    if name == "fake":
        with tempfile.TemporaryDirectory(prefix="phalanx-fake-") as folder, fake_api(folder) as fake:
            yield TestedCluster(fake.kubeconfig, fake.store.compact)
    elif os.environ.get(KUBECONFIG):
        yield TestedCluster(os.environ[KUBECONFIG])
    else:
        with importlib.import_module("tests.kubernetes.real_cluster").RealCluster() as real:
            yield TestedCluster(real.kubeconfig(), real.compact)
