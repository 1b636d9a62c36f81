"""vLLM itself keeps the protocol that the gateway and the engine of the tests rely on."""

import pytest

from benchmarks.cluster import free_port
from tests import vllm_here
from tests.contract.engine_protocol import EngineProtocol, Running

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not vllm_here.installed(), reason="vLLM is not installed (make vllm-tools)"),
]


class TestVllm(EngineProtocol):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory):
        port = free_port()
        with vllm_here.replica(port, tmp_path_factory.mktemp("vllm") / "log"):
            yield Running(f"http://127.0.0.1:{port}")
