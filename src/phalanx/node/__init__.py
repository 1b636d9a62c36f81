"""The supervisor that runs beside the ranks on each node. It imports no server code."""
