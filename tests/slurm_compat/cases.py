"""The scripts of the comparison: their arguments, and the programs and files that they expect to find."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
SCRIPTS: Final = tuple(sorted((FOLDER / "scripts").glob("*.sbatch")))
"""Each is written in the shape of the public script of the same number in `sources.tsv`."""
HET_SCRIPTS: Final = tuple(sorted((FOLDER / "scripts" / "het").glob("*.sbatch")))
"""Heterogeneous jobs, of which none was drawn. The components of one step have the same name, partition, tasks per node and distribution: real srun sets
these variables for one component while it starts the other, so that a task sees now its own, now those of the last."""

PROGRAMS: Final = (
    *("python", "python3", "module", "ml", "conda", "pip", "uv", "matlab", "R", "Rscript", "mpirun", "torchrun"),
    *("deepspeed", "accelerate", "ray", "curl", "nvidia-smi", "apptainer", "anemoi-training", "spark-start"),
    *("spark-submit", "clear"),
)
"""Programs on PATH that a recorder stands in for."""

LOCAL_PROGRAMS: Final = ("relax", "omp_diag", "integrate", "pi", "mpi_cuda", "sobel")
"""The same in the script's folder."""

ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "08": ("s1", "0.5"),
    "10": ("small", "zero3", "alpaca"),
    "14": ("--epochs", "3"),
    "19": ("first try", "config.yaml"),
    "37": ("small", "zero3", "--accumulation_steps=4 --x"),
    "42": ("run 7", "5000", "false"),
    "57": ("recipe.yaml", "0", "500"),
    "58": ("--model", "m/8B", "--dataset", "alpaca"),
}
"""By number; words after the script on the command line."""

DIRECTORIES: Final = (
    *(
        "logs/sbatch_log",
        "out",
        ".slurm",
        "slurm_outputs",
        "logs_slurm",
        "data/daily",
        "src",
        "train/configs",
        "job_output",
    ),
)
FILES: Final[Mapping[str, str]] = {
    ".env": "KEY=value\n",
    "recipe.yaml": "accumulation_steps: 8\n",
    "config.yaml": "seed: 1\n",
    "conda.sh": "true\n",
    "main.sh": "python inside.py\n",
    "start.sh": "#!/bin/bash\ntorchrun --node_rank $SLURM_NODEID --nnodes $SLURM_NNODES train.py\n",
    "data/daily/first.slurm": "#!/bin/bash\n#SBATCH --job-name=first\npython first.py\n",
    "data/daily/second.slurm": "#!/bin/bash\n#SBATCH -J second -p cpu\npython second.py\n",
}
HOME_FILES: Final[Mapping[str, str]] = {".bashrc": "true\n", "start-user": "true\n"}
ENVIRONMENT: Final[Mapping[str, str]] = {"TERM": "xterm", "FROM_THE_SHELL": "yes", "TRAIN_ROOT": "train"}
DIFFERENT: Final[Mapping[str, str]] = {
    "19": "Slurm ends a job whose output file it cannot create; here the output is in `phalanx logs`, and the submit's log says so",
}
"""Scripts that do something else here, on purpose, with the reason."""
