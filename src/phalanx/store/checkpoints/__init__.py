"""The head's copies of checkpoints."""
