"""Node pools on clouds under faults: see `python -m benchmarks.clouds --help`."""
