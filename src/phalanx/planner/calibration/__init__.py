"""Measured speeds of this cluster's devices and network levels, against the tables' figures."""
