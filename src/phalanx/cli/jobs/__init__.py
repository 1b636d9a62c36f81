"""Commands for jobs: submit, follow, inspect, change, download outputs."""
