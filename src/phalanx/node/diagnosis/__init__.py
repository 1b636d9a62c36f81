"""Evidence of failures and hangs: last lines, stack dumps, stalled ranks."""
