"""Ray brings the supervisors: one on each node of a Ray cluster, in an actor that is pinned there and holds the node's GPUs.

Ray itself is imported in `driver.py` and `carrier.py` alone, which run in processes of their own: a driver that loses its Ray head aborts.
"""
