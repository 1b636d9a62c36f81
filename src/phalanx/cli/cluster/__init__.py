"""Verbs about the cluster: bringing it up and down, its nodes, its health."""
