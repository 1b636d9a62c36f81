"""A member while it runs: its container, its scratch folder, the reports of its ranks."""
