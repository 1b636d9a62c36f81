"""The engine for this machine: virtual nodes as process trees, and its real GPUs."""
