"""Inference: memory and time of a model that answers requests, and the GPUs that a number of users needs."""
