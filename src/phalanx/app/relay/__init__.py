"""`phalanx relay`: the process, and the key that it shares with its head."""
