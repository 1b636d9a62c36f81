"""The supervisor's decisions: step(now, inbox) -> actions, without input or output of its own."""
