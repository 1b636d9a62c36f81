"""A node pool in the drill: its simulated provider, its users and faults, and its invariant."""
