"""Bad input, in numbers: hostile requests against a real head, hostile files and words against the command line. `python -m tests.hostile`."""
