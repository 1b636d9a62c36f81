"""The terminal of a job's first rank, which outlives its clients."""
