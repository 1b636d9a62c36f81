"""The Notifier port on Apprise, which knows some hundred services by URL: `mailto://`, `slack://`, `json://` and so on."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.errors import BadRequest, TryLater
from phalanx.core.work.channel import Message

if TYPE_CHECKING:
    import apprise

# Services that reach only the head's own machine or screen, where messages would not be read; some run programs.
_LOCAL: Final = frozenset({"dbus", "glib", "gnome", "growl", "kde", "macosx", "qt", "syslog", "windows"})
# Services whose path Apprise shows whole, although it often is the secret: webhooks, and topics that are readable for all who know them.
_PATH_IS_SECRET: Final = frozenset({"form", "json", "ntfy", "xml"})
_EXAMPLE: Final = "mailto://USER:PASSWORD@example.org, slack://..., json://HOST/PATH; see the list of Apprise"
_SECRET: Final = re.compile(r"\S*://\S*")


class AppriseNotifier:
    """See the port. Importing Apprise takes most of a second, so it waits for the first use."""

    def describe(self, url: str) -> str:
        """Return the URL without its secrets.

        Raises:
            BadRequest: no service has such a URL.
        """
        service = _service(url)
        shown = str(service.url(privacy=True)).partition("?")[0]
        scheme, _, rest = shown.partition("://")
        if scheme.removesuffix("s") not in _PATH_IS_SECRET:
            return shown
        host, _, path = rest.partition("/")
        return f"{scheme}://{host}/..." if path else f"{scheme}://{'...' if scheme.startswith('ntfy') else host}"

    def send(self, url: str, message: Message) -> None:
        """Send a message.

        Raises:
            TryLater: the service did not accept it.
        """
        import apprise

        service = _service(url)
        capture: Any = apprise.LogCapture
        with capture(level=logging.WARNING) as said:
            try:
                accepted = service.notify(body=message.body, title=message.title, body_format=apprise.NotifyFormat.TEXT)
            except Exception as error:  # a plug-in of Apprise may raise anything
                raise TryLater(f"{service.service_name}: {type(error).__name__}") from error
        if not accepted:
            raise TryLater(f"{service.service_name}: {_reason(said.getvalue())}")


def _service(url: str) -> Any:
    import apprise

    scheme = url.partition("://")[0].lower()
    if scheme in _LOCAL:
        raise BadRequest(f"{scheme}:// reaches only the head's own machine", hint=_EXAMPLE)
    found = apprise.Apprise.instantiate(url, asset=_asset(), suppress_exceptions=True)
    if found is None:
        raise BadRequest("the URL is not that of a known service, or lacks a part", hint=_EXAMPLE)
    return found


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
    text = lines[-1].rpartition(" - ")[2] if lines else "not accepted"
    return _SECRET.sub("...", text)[:200]
