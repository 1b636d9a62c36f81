"""Sends messages to services outside: mail, chat, webhooks."""

from __future__ import annotations

from typing import Protocol

from phalanx.core.work.channel import Message


class Notifier(Protocol):
    """Sends one message to a URL. Thread-safe; blocks on the network."""

    def describe(self, url: str) -> str:
        """Return the URL without its secrets.

        Raises:
            BadRequest: no service has such a URL; the message does not quote it.
        """
        ...

    def send(self, url: str, message: Message) -> None:
        """Send a message.

        Raises:
            TryLater: the service did not accept it; the message says why, without secrets.
        """
        ...
