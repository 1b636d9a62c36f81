"""The rank program of `phalanx calibrate`: every rank of the fleet measures at once, and rank 0 writes what was found.

`python -m phalanx.torch.calibrate`, as an ordinary job. It knows nothing of profiles, facts or heads: samples go into a file.
"""
