"""Servers that joined by `phalanx join`, which starts their supervisor; no engine of the head watches it."""
