"""Rendered text compared with files."""
