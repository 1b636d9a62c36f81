"""Datasets on this node: their sources, the cache, and the program that stages them."""
