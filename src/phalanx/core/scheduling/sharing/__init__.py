"""Parts of devices: which devices are shared, where a part goes best, and the slices of MIG."""
