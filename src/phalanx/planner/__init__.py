"""Splits a model over GPUs: hardware and model facts, the cost of a step, and the search for the best layout."""
