"""How a client finds and reaches a head."""
