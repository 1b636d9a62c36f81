"""The engine of a Slurm cluster: its inventory, and one Slurm job for each attempt."""
