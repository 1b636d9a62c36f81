"""Nodes, devices and topology."""
