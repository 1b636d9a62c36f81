"""How a supervisor is brought to a node: one folder for each kind of cluster."""
