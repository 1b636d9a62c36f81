"""Sweeps: trials of one command with different parameters, each an ordinary job, chosen and stopped early by Optuna."""
