"""Readings of hardware and kernel: devices, links, samples, preflight checks."""
