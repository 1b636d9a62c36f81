"""`phalanx plan` and `phalanx calibrate`: plan how to split a model on a fleet, and measure the fleet."""
