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

    def send(self, url: str, message: Message, *, to: str = "", from_user: bool = False) -> None:
        """Send a message. `to`: a mail address in place of those of a mail URL; `from_user`: the URL is a user's, and may lead to public services only.

        Raises:
            BadRequest: a user may not have such a URL; the message does not quote it.
            TryLater: the service did not accept it; the message says why, without secrets.
        """
        ...
