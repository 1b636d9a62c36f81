"""`phalanx top`: devices and jobs, live."""
