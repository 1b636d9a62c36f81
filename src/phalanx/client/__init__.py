"""How Python programs and the command line speak to a head. Standard library alone until a record is decoded."""

from phalanx.client.client import Client
from phalanx.client.following import Event
from phalanx.client.jobs import Submission

__all__ = ["Client", "Event", "Submission"]
