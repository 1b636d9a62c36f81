"""Sends messages with Apprise, which speaks mail, Slack, Teams, webhooks and about a hundred other services."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from phalanx.core.errors import BadRequest, TryLater
from phalanx.core.work.channel import Message
from phalanx.providers.notifications.apprise_service import apprise_service, deliver

# Services whose path Apprise shows whole, although it often is the secret: webhooks, and topics that are readable for all who know them.
_PATH_IS_SECRET: Final = frozenset({"form", "json", "ntfy", "xml"})
# Services whose messages are one request over HTTP, for the URLs of users. Mail is not among them: its plug-in reads files that a URL names.
_FOR_USERS: Final = frozenset(
    [
        "discord",
        "form",
        "forms",
        "gchat",
        "gotify",
        "gotifys",
        "json",
        "jsons",
        "mmost",
        "mmosts",
        "ntfy",
        "ntfys",
        "opsgenie",
        "pagerduty",
        "pbul",
        "pover",
        "rocket",
        "rockets",
        "slack",
        "tgram",
        "workflow",
        "workflows",
        "wxteams",
        "xml",
        "xmls",
        "zulip",
    ]
)
_USER_PROGRAM: Final = (sys.executable, "-I", "-m", "phalanx.providers.notifications.user_message_main")
_USER_TIMEOUT_S: Final = 40.0  # the program ends itself earlier
_USER_VARIABLES: Final = frozenset(
    {"PATH", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
)


class AppriseNotifier:
    """See the port. Importing Apprise takes most of a second, so it waits for the first use. `user_program`: sends to URLs of users."""

    def __init__(self, *, user_program: Sequence[str] = _USER_PROGRAM) -> None:
        self._user_program = tuple(user_program)

    def describe(self, url: str) -> str:
        """Return the URL without its secrets.

        Raises:
            BadRequest: no service has such a URL.
        """
        shown = str(apprise_service(url).url(privacy=True)).partition("?")[0]
        scheme, _, rest = shown.partition("://")
        if scheme.removesuffix("s") not in _PATH_IS_SECRET:
            return shown
        host, _, path = rest.partition("/")
        return f"{scheme}://{host}/..." if path else f"{scheme}://{'...' if scheme.startswith('ntfy') else host}"

    def send(self, url: str, message: Message, *, to: str = "", from_user: bool = False) -> None:
        """Send a message.

        Raises:
            BadRequest: a user may not have such a URL.
            TryLater: the service did not accept it.
        """
        if from_user:
            self._send_apart(url, message)
            return
        service = apprise_service(url)
        if to:
            service.targets, service.cc, service.bcc = [(False, to)], set(), set()
        deliver(service, message.title, message.body)

    def _send_apart(self, url: str, message: Message) -> None:
        """Send to a URL of a user, in a process that may do little else."""
        scheme = url.partition("://")[0].lower()
        if scheme not in _FOR_USERS:
            raise BadRequest(
                "the URL in the secret is not that of a service for users", hint=", ".join(sorted(_FOR_USERS))
            )
        given = json.dumps({"url": url, "title": message.title, "body": message.body})
        env = {name: value for name, value in os.environ.items() if name.upper() in _USER_VARIABLES}
        try:
            done = subprocess.run(
                self._user_program,
                input=given,
                capture_output=True,
                text=True,
                env=env,
                cwd="/",
                timeout=_USER_TIMEOUT_S,
                check=False,
            )
            error = str(json.loads(done.stdout)["error"])
        except subprocess.TimeoutExpired:
            error = f"{scheme}: no reply"
        except ValueError:
            error = f"{scheme}: it was ended for taking too much time or memory"
        if error:
            raise TryLater(error)
