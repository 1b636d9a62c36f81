"""`phalanx sweep`: starts, resumes and shows sweeps."""
