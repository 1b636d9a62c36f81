"""Servers that came by themselves: `phalanx join` starts a supervisor there, and no engine of the head's watches it."""
