"""The job and attempt machine: (state, event) -> (state, commands)."""
