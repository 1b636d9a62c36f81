"""The head's loop: step(now, inbox) -> outbox, synchronous and without input or output of its own."""
