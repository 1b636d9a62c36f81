"""The limits of queues: what a queue may hold, what its users may, and whether its settings are valid."""
