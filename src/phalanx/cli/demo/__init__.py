"""`phalanx demo`: a cluster of its own, a real training job, a killed node, and the bill."""
