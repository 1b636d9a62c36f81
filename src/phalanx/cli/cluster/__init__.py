"""Commands for the cluster: start and stop, nodes, topology, backup, diagnosis."""
