"""A real Phalanx, real processes, real kills."""
