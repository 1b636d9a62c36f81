"""Search the layouts of a model on a fleet: those that fit, the fastest, and why the others were rejected."""
