"""The suite; each folder is one kind of test (docs in CONTRIBUTING.md)."""
