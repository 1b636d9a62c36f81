"""`phalanx plan --serve`: the GPUs that a model needs to answer a number of users in time."""
