"""`#SBATCH` scripts: their options, and the job that a script asks for."""
