#!/usr/bin/python3 -IS
"""Stands in for a program that batch scripts call (python, module, conda, torchrun ...): records how it was called, and ends well.

Copied under each program's name; RECORDS is replaced by the folder of the records. Standard library only, started without site: it runs
hundreds of times.
"""

import json
import os
import sys
import time

RECORDS = "@RECORDS@"
VARIABLES = (
    "SLURM",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ENVIRONMENT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_",
    "OMP_NUM_THREADS",
    "PMI",
    "OMPI_",
    "JAX_",
    "TF_CONFIG",
    "FROM_THE_SHELL",
    "NCCL_",
)


def main() -> int:
    """Record the call. A container runtime runs its command, as the real one does."""
    name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
    seen = {key: value for key, value in os.environ.items() if key.startswith(VARIABLES)}
    path = os.path.join(RECORDS, f"{time.time_ns()}-{os.getpid()}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"program": name, "argv": words, "cwd": os.getcwd(), "env": seen}, file)
    if name == "nvidia-smi":
        print("one GPU")
    elif name == "apptainer" and words[:1] == ["exec"]:
        rest = words[1:]
        with_value = {"--bind", "--env-file", "--pwd", "--env", "--home"}
        while rest and rest[0].startswith("-"):
            word = rest.pop(0)
            if word == "--pwd":
                os.chdir(rest[0])
            if word in with_value:
                rest.pop(0)
        os.execvp(rest[1], rest[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
