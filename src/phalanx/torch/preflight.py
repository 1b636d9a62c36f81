"""Matrix products on every visible device, in a second: `python -m phalanx.torch.preflight`, which a supervisor starts before a gang.

Prints a JSON object a line: `{"device": 0, "flops": 6.1e14, "least_flops": 3.3e13}`, or with `"error"` where a device fails or computes
wrong. `device` counts the visible ones. Says nothing and ends with 0 where torch sees no GPU. Judges nothing: `node.logic.fitness` does.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

import torch

SIZE: Final = 4096  # square; its product fills every multiprocessor of any GPU there is, and takes a millisecond
REPEATS: Final = 20
FP32_LANES: Final = 64
"""Multiply-adds that a multiprocessor makes in a cycle, at least, in plain FP32: 64 on compute capability 7.0 to 8.0, 128 on later ones
(NVIDIA, CUDA C++ Programming Guide, "Arithmetic Instructions"). Half-precision products run on tensor cores, at several times that."""
LEAST_SHARE: Final = 0.5


def main() -> None:
    """Measure each device."""
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            found = measured(torch.device("cuda", device))
        except RuntimeError as error:  # CUDA's own: a device that fell off the bus, out of memory, an illegal access
            found = {"error": str(error).splitlines()[0][:300]}
        print(json.dumps({"device": device, **found}), flush=True)


def measured(device: Any) -> dict[str, Any]:
    """Rate of half-precision products, and what any sound device of its make gives."""
    properties = torch.cuda.get_device_properties(device)
    # In kHz, and not told by every release of torch: then the node's other devices are the only measure.
    clock_hz = getattr(properties, "clock_rate", 0) * 1e3
    ones_MK = torch.ones(SIZE, SIZE, dtype=torch.float16, device=device)
    halves_KN = torch.full((SIZE, SIZE), 0.5, dtype=torch.float16, device=device)
    product_MN = ones_MK @ halves_KN
    torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    for _ in range(REPEATS):
        torch.mm(ones_MK, halves_KN, out=product_MN)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began_s
    # Every element is SIZE halves: 2048, which FP16 holds exactly.
    wrong = int((product_MN != SIZE / 2).sum())
    if wrong:
        return {"error": f"{wrong} of {SIZE * SIZE} elements of a product are wrong"}
    least = LEAST_SHARE * 2 * FP32_LANES * properties.multi_processor_count * clock_hz
    return {"flops": REPEATS * 2 * SIZE**3 / seconds, "least_flops": least}


if __name__ == "__main__":
    main()
