"""Composition roots: the only modules that choose classes and connect the services."""
