"""Nodes on smaller clouds, each described by a table."""
