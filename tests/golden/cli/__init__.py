"""Screens of the command line, drawn from canned views and compared with files."""
