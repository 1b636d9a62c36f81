"""JAX over all tasks of the job: `jax.distributed.initialize()` finds rank, size and coordinator by itself."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

STEPS = 30

jax.distributed.initialize()
print(f"process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} devices here", flush=True)
gradient = jax.jit(jax.grad(lambda weight, offset: (2.0 * weight - 6.0 - offset) ** 2))
weight = jnp.float32(0.0)
for step in range(STEPS):
    # Each process has another offset; their mean is 0.
    offset = jnp.float32(jax.process_index() - (jax.process_count() - 1) / 2)
    weight -= 0.05 * multihost_utils.process_allgather(gradient(weight, offset)).mean()
    if jax.process_index() == 0 and step % 10 == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.1)
print(f"done: weight {float(weight):.3f}", flush=True)
