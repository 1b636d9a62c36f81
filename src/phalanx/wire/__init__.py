"""What crosses the network or a process boundary, versioned; accepts the release before."""
