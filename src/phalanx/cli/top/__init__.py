"""`phalanx top`: a live view of devices and jobs."""
