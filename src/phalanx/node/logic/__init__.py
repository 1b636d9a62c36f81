"""The supervisor's decisions: step(now, inbox) -> actions. Nothing here performs input or output."""
