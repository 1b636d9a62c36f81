"""Training of any network from its counts: parameters, FLOPs, memory traffic and saved activations of one micro-batch."""
