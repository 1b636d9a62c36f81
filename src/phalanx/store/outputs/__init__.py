"""The head's copies of output files."""
