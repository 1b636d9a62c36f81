"""What exists: nodes, devices, topology."""
