"""Services under simulated load, in virtual time."""
