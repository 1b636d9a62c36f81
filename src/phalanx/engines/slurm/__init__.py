"""The engine for Slurm clusters: reads their inventory, and runs each attempt as one Slurm job."""
