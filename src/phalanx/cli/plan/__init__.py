"""`phalanx plan` and `phalanx calibrate`: how a model is split on a fleet, what that costs, and what the fleet is able to."""
