"""The pages of the login of a command line."""

from __future__ import annotations

from urllib.parse import urlencode

from phalanx.web.document import Viewer, document, plain_document
from phalanx.web.html import Html, element


def login_page(path: str, word: str, viewer: Viewer) -> Html:
    """Return the page that asks whether a command line may have a token. `word`: that the command line shows too."""
    form = element(
        "form",
        element("input", type="hidden", name="csrf", value=viewer.csrf),
        element("button", "Give it a token", type="submit", class_="primary"),
        method="post",
        action=path,
    )
    return document(
        "login",
        "Command line",
        element("p", "A command line asks for a token of ", element("strong", viewer.user), "."),
        element("p", "Go on only if you have just started it, and if it shows this word:"),
        element("p", element("strong", word, class_="word")),
        form if viewer.csrf else element("p", "Open this page in a browser that is signed in.", class_="problem"),
        viewer=viewer,
    )


def login_done_page(port: int, code: str, state: str, *, assets: str) -> Html:
    """Return the page that leads the browser to the command line on its machine. Elsewhere the code is pasted."""
    url = f"http://127.0.0.1:{port}/?{urlencode({'code': code, 'state': state})}"
    return plain_document(
        "Command line",
        element("p", element("a", "Pass the token to the command line", href=url, class_="button")),
        element("p", "If it runs on another machine than this browser, paste this code there, within a minute:"),
        element("p", element("code", code, class_="word")),
        assets=assets,
    )
