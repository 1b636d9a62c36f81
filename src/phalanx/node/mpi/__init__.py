"""MPI launchers over several nodes without ssh: the launcher runs on node rank 0, and an agent of ours starts its daemons on the others."""
