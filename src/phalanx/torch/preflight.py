"""Run matrix products on every visible device for a second: `python -m phalanx.torch.preflight`, started by a supervisor before a gang.

Prints one JSON object per line: `{"device": 0, "flops": 6.1e14, "least_flops": 3.3e13}`, or with `"error"` if a device fails or computes
wrong results. `device` is the index among visible devices. Without a GPU it prints nothing and exits with 0. `node.logic.preflight_checks` evaluates
the results.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

import torch

SIZE: Final = 4096  # square matrices; the product uses all multiprocessors of any GPU and takes a millisecond
REPEATS: Final = 20
FP32_LANES: Final = 64
"""Minimum of FP32 multiply-adds of a multiprocessor per cycle: 64 on compute capability 7.0 to 8.0, 128 on later ones
(NVIDIA, CUDA C++ Programming Guide, "Arithmetic Instructions"). Half-precision products run on tensor cores, at several times that."""
LEAST_SHARE: Final = 0.5


def main() -> None:
    """Measure each device."""
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            found = measure_device(torch.device("cuda", device))
        except RuntimeError as error:  # CUDA's own: a device that fell off the bus, out of memory, an illegal access
            found = {"error": str(error).splitlines()[0][:300]}
        print(json.dumps({"device": device, **found}), flush=True)


def measure_device(device: Any) -> dict[str, Any]:
    """Measure the rate of half-precision products; return it with the minimum for a healthy device."""
    properties = torch.cuda.get_device_properties(device)
    # In kHz; missing in some releases of torch. Then only a comparison with other devices of the node remains.
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
    # Every element is SIZE / 2 = 2048, which FP16 represents exactly.
    wrong = int((product_MN != SIZE / 2).sum())
    if wrong:
        return {"error": f"{wrong} of {SIZE * SIZE} elements of a product are wrong"}
    least = LEAST_SHARE * 2 * FP32_LANES * properties.multi_processor_count * clock_hz
    return {"flops": REPEATS * 2 * SIZE**3 / seconds, "least_flops": least}


if __name__ == "__main__":
    main()
