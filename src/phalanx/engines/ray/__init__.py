"""The engine for Ray clusters: an actor pinned to each Ray node holds the node's GPUs and starts a supervisor.

Only `driver.py`, `node_actor.py` and `private_api.py` import Ray. They run in their own processes: Ray aborts a driver whose Ray head is lost.
"""
