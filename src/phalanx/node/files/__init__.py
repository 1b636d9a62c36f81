"""Folders of the node: caches, virtual environments, working directories, checkpoints."""
