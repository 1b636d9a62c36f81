"""The rank program of `phalanx calibrate`: all ranks of the fleet measure at once, and rank 0 writes the samples to a file.

Runs as an ordinary job: `python -m phalanx.torch.calibrate`. It does not depend on profiles, facts or heads.
"""
