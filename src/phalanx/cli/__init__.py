"""Command line: parses arguments, calls the client, prints tables and next steps."""
