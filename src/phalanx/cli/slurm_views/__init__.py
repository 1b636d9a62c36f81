"""Slurm's commands as thin views of Phalanx: on PATH inside `#SBATCH` jobs, and at the prompt by `eval "$(phalanx slurm-env)"`."""
