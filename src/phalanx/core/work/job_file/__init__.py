"""The keys of a job file: their grammar, and the request that they make."""
