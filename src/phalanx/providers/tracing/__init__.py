"""Collectors of traces."""
