"""`sbatch` scripts and `srun` for jobs that were written for Slurm."""
