"""Nodes on Google Compute Engine."""
