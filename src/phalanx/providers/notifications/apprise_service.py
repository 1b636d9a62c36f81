"""One service of Apprise: made from a URL, and given a message."""

from __future__ import annotations

import io
import logging
import re
import threading
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.errors import BadRequest, TryLater

if TYPE_CHECKING:
    import apprise

# Services of Apprise that talk to the desktop or to the log of the machine they run on.
_LOCAL: Final = frozenset({"dbus", "glib", "gnome", "growl", "kde", "macosx", "qt", "syslog", "windows"})
_EXAMPLE: Final = "mailto://USER:PASSWORD@example.org, slack://..., json://HOST/PATH; see the list of Apprise"
_SECRET: Final = re.compile(r"\S*://\S*")


def apprise_service(url: str) -> Any:
    """Return the service of a URL.

    Raises:
        BadRequest: it is unknown, lacks a part, or reaches the head's own machine only; the message does not quote it.
    """
    import apprise

    scheme = url.partition("://")[0].lower()
    if scheme in _LOCAL:
        raise BadRequest(f"{scheme}:// reaches only the head's own machine", hint=_EXAMPLE)
    found = apprise.Apprise.instantiate(url, asset=_asset(), suppress_exceptions=True)
    if found is None:
        raise BadRequest("the URL is not that of a known service, or lacks a part", hint=_EXAMPLE)
    return found


def deliver(service: Any, title: str, body: str) -> None:
    """Send a message.

    Raises:
        TryLater: the service did not accept it; the message says why, without secrets.
    """
    import apprise

    said, thread = io.StringIO(), threading.get_ident()
    handler = logging.StreamHandler(said)
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: record.thread == thread)  # other messages are on their way at the same time
    log = logging.getLogger("apprise")
    log.addHandler(handler)
    try:
        accepted = service.notify(title=title, body=body, body_format=apprise.NotifyFormat.TEXT)
    except Exception as error:  # a plug-in of Apprise may raise anything
        raise TryLater(f"{service.service_name}: {type(error).__name__}") from error
    finally:
        log.removeHandler(handler)
    if not accepted:
        raise TryLater(f"{service.service_name}: {_reason(said.getvalue())}")


def _asset() -> apprise.AppriseAsset:
    """No files on the disk, no pictures that receivers would load from elsewhere."""
    import apprise

    return apprise.AppriseAsset(
        app_id="Phalanx",
        app_desc="Phalanx",
        app_url="",
        image_url_mask="",
        image_url_logo="",
        secure_logging=True,
        storage_mode=apprise.PersistentStoreMode.MEMORY,
    )


def _reason(said: str) -> str:
    """The last line that Apprise logged, without URLs."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return _SECRET.sub("...", lines[-1])[:200] if lines else "not accepted"
