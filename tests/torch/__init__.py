"""phalanx.torch in real gangs of processes on CPU."""
