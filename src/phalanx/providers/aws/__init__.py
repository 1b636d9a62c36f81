"""Nodes on Amazon EC2."""
