"""Nodes that a script of the operator starts and stops."""
