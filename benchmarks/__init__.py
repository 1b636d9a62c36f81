"""Benchmarks of Phalanx. Each module prints a table, or JSON with `--json`; none of them asserts a time."""
