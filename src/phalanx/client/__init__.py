"""HTTP client of the head, for Python programs and the command line. Only the standard library is imported until a record is decoded."""

from phalanx.client.client import Client
from phalanx.client.connection.event_stream import Event
from phalanx.client.jobs import Submission

__all__ = ["Client", "Event", "Submission"]
