"""Converts files of other tools to the keys of our job file."""
