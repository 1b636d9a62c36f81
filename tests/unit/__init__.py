"""One module at a time, no processes, no clock."""
