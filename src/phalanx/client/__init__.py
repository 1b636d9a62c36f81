"""How Python programs and the command line speak to a head. Standard library alone until a record is decoded."""

from phalanx.client.client import Client, Submission
from phalanx.client.following import Event

__all__ = ["Client", "Event", "Submission"]
