"""The job that a command line describes: options, job file and `#SBATCH` script become the keys that are sent to the head."""
