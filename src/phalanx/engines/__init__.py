"""Engines start supervisors on nodes: one folder for each kind of cluster."""
