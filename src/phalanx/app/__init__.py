"""Composition roots: the only modules that pick classes and wire the parts together."""
