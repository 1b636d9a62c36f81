"""Whether a job can start now, later or never."""
