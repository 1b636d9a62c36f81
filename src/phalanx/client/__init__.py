"""The typed HTTP client that scripts and the CLI use."""
