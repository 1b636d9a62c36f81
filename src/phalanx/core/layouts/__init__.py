"""Which layouts of a model exist on a fleet, which of them fit, which is best, and why the others lost."""
