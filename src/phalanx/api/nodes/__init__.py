"""The API for supervisors: joining, sessions, checkpoints and outputs."""
