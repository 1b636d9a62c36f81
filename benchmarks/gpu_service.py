"""A service with vLLM on a real GPU: its replica sleeps, the GPU trains, the replica wakes.

`python -m benchmarks.gpu_service --out FOLDER` makes a Llama of the given shape with random weights, serves it with `vllm serve`, and measures
what `phalanx sleep` and `phalanx wake` take, and vLLM's levels of sleep alone. `docs/gpu.md` has the figures of the runs so far.
Needs vLLM and transformers, and about 2.5 times the weights in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

from benchmarks.gpu import Bench

SHAPES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
VOCABULARY = 128256
PROMPT = list(range(10, 138))

MAKE = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
folder, shape, vocabulary = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=4096, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, **shape)
with torch.device("cuda"):
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
model.save_pretrained(folder, max_shard_size="4GB")
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokens = {"<unk>": 0, "<s>": 1, "</s>": 2, **{letter: i + 3 for i, letter in enumerate(letters)}}
words = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>").save_pretrained(folder)
print("parameters", sum(p.numel() for p in model.parameters()))
"""
HOLD = """
import sys, time, torch
end = time.time() + float(sys.argv[2])
block = torch.empty(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
n = 0
torch.cuda.synchronize(); began = time.time()
while time.time() < end:
    for _ in range(20): a @ a
    torch.cuda.synchronize(); n += 20
print('{"tflops": %.0f, "gib": %.1f, "seconds": %.1f}' % (n * 2 * 8192**3 / (time.time() - began) / 1e12, block.numel() / 2**30, time.time() - began))
"""


class Memory(threading.Thread):
    """Reads the memory in use on the first GPU 20 times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.rows: list[tuple[float, float]] = []

    def run(self) -> None:
        """Read until the end of the process; seconds of the epoch, GiB."""
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        while True:
            self.rows.append((time.time(), pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30))
            time.sleep(0.05)

    @property
    def now(self) -> float:
        """GiB in use at the last reading."""
        return round(self.rows[-1][1], 2) if self.rows else -1.0


def post(url: str, body: Any, limit_s: float = 120.0) -> Any:
    """Send one request; return the decoded answer."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        text = answer.read()
    return json.loads(text) if text.strip() else None


def complete(url: str) -> tuple[str, float]:
    """Greedy answer to the prompt, and the seconds that it took."""
    began = time.monotonic()
    answer = post(
        f"{url}/v1/completions",
        {"model": "chat", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True},
    )
    return answer["choices"][0]["text"], time.monotonic() - began


def write_job_file(bench: Bench, server: list[str]) -> None:
    """Write the job file of the service."""
    variables = {key: os.environ[key] for key in ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH") if key in os.environ}
    variables |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    with open(os.path.join(bench.out, "chat.yaml"), "w", encoding="utf-8") as file:
        json.dump(
            {
                "type": "service",
                "name": "chat",
                "gpus": 1,
                "memory": "64GiB",
                "ready": "/health",
                "ready_within": "10m",
                "run": "exec " + " ".join(server) + " --port $PORT",
                "env": variables,
                "sleep": "/sleep?level=1",
                "wake": "/wake_up",
            },
            file,
        )


def levels_of_sleep(bench: Bench, memory: Memory, url: str, text: str) -> dict[str, Any]:
    """What vLLM's levels take without Phalanx. Level 2 drops the weights, which a second request then reads again."""
    levels: dict[str, Any] = {}
    for level in (1, 2):
        began = time.monotonic()
        post(f"{url}/sleep?level={level}", {})
        row = {"sleep_s": time.monotonic() - began}
        time.sleep(0.3)
        row["memory"] = memory.now
        began = time.monotonic()
        if level == 2:
            post(f"{url}/wake_up?tags=weights", {})
            post(f"{url}/collective_rpc", {"method": "reload_weights"})
            row["weights_s"] = time.monotonic() - began
            post(f"{url}/wake_up?tags=kv_cache", {})
        else:
            post(f"{url}/wake_up", {})
        row["wake_s"] = time.monotonic() - began
        again, _ = complete(url)
        row["wake_to_answer_s"] = time.monotonic() - began
        row["same_answer"] = again == text
        levels[f"level_{level}"] = row
        bench.log(json.dumps(levels))
    return levels


def service(bench: Bench, memory: Memory, server: list[str]) -> dict[str, Any]:
    """Serve, sleep, train, wake; then the levels of sleep without Phalanx."""
    found: dict[str, Any] = {"memory_idle": memory.now}
    write_job_file(bench, server)

    def until(what: str, true: Any, limit_s: float) -> float:
        began, shown = time.monotonic(), {}
        while time.monotonic() - began < limit_s:
            shown = bench.json("show", "chat")["service"]
            if true(shown):
                return time.monotonic() - began
            if (
                shown.get("failure")
                or shown["state"] == "failed"
                or any(one.get("restarts") for one in bench.json("show", "chat")["replicas"])
            ):
                break
            time.sleep(0.2)
        bench.log(json.dumps(shown, indent=1, default=str)[:3000])
        raise TimeoutError(what)

    def endpoint() -> str:
        first = bench.json("show", "chat")["service"]["endpoints"][0]
        return f"http://{first['address']}:{first['port']}"

    began = time.monotonic()
    bench.phalanx("submit", "chat.yaml")
    until("ready", lambda shown: shown["state"] == "ready", 170)
    found["submit_to_ready_s"] = time.monotonic() - began
    url = endpoint()
    text, first = complete(url)
    found["first_answer_s"], found["memory_serving"] = first, memory.now
    found["answer_s"] = min(complete(url)[1] for _ in range(3))
    for turn in (1, 2):
        began = time.monotonic()
        bench.phalanx("sleep", "chat")
        until("asleep", lambda shown: shown["state"] == "sleeping", 150)
        found[f"sleep_{turn}_s"] = time.monotonic() - began
        found[f"memory_asleep_{turn}"] = memory.now
        bench.log(bench.phalanx("nodes"))
        if turn == 1:
            printed = bench.phalanx(
                "run", "--gpus", "1", "-e", "PYTHONPATH", "--", sys.executable, "-c", HOLD, "60", "8", limit_s=120
            )
            found["training_meanwhile"] = [line for line in printed.splitlines() if "tflops" in line]
        began = time.monotonic()
        bench.phalanx("wake", "chat")
        until("awake", lambda shown: shown["state"] == "ready", 150)
        found[f"wake_to_ready_{turn}_s"] = time.monotonic() - began
        again, _ = complete(url)
        found[f"wake_to_answer_{turn}_s"] = time.monotonic() - began
        found[f"same_answer_{turn}"] = again == text
        found[f"memory_awake_{turn}"] = memory.now
    # A job holds the GPU when the replica shall wake: it waits for it, and says so.
    bench.phalanx("sleep", "chat")
    until("asleep", lambda shown: shown["state"] == "sleeping", 150)
    bench.phalanx("submit", "--gpus", "1", "-e", "PYTHONPATH", "--", sys.executable, "-c", HOLD, "40", "10")
    time.sleep(4)
    began = time.monotonic()
    bench.phalanx("wake", "chat")
    bench.phalanx("why", "1")
    bench.phalanx("ps", "-a")
    until("awake", lambda shown: shown["state"] == "ready", 150)
    found["wake_behind_a_job_s"] = time.monotonic() - began
    found["same_answer_3"] = complete(endpoint())[0] == text
    found["levels"] = levels_of_sleep(bench, memory, url, text)
    bench.phalanx("cancel", "chat")
    return found


def main() -> None:
    """Make the model, serve it, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".", help="folder for the log and the figures")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--server", default="", help="command of another server, for a trial without a GPU")
    options = parser.parse_args()
    bench = Bench(out=os.path.abspath(options.out))
    bench.environment = {**os.environ, "PHALANX_HOME": os.path.join("/tmp/gs", "home")}
    memory = Memory()
    memory.start()
    folder = "/tmp/gs/model"
    os.makedirs(folder, exist_ok=True)
    if not options.server:
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", MAKE, folder, json.dumps(SHAPES[options.shape]), str(VOCABULARY)], check=True
        )
        bench.log(f"model made in {time.monotonic() - began:.1f} s")
    server = options.server.split() or [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        folder,
        "--host",
        "0.0.0.0",
        "--served-model-name",
        "chat",
        "--enforce-eager",
        "--max-model-len",
        "2048",
        "--gpu-memory-utilization",
        "0.85",
        "--enable-sleep-mode",
        "--attention-backend",
        "TRITON_ATTN",
    ]
    try:
        bench.section("up", lambda it: it.phalanx("up", "--port", str(it.port)))
        bench.section("service", lambda it: service(it, memory, server))
        bench.phalanx("logs", "chat")
        bench.phalanx("logs", "1")
    finally:
        bench.phalanx("down", "--cancel-jobs")


if __name__ == "__main__":
    main()
