"""`phalanx plan --module`: layouts, memory and step time of any network that was counted."""
