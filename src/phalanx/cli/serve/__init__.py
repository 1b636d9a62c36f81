"""`phalanx serve`: starts, changes and stops services, and serves a model without a job file."""
