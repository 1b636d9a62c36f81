"""Measurements against the targets of the design; run with python -m benchmarks.NAME."""
