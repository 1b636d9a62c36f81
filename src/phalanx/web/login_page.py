"""The pages of the login of a command line."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from phalanx.web.document import Viewer, document, plain_document
from phalanx.web.html import Html, element

_NO_SESSION: Final = element("p", "Open this page in a browser that is signed in.", class_="problem")


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
        form if viewer.csrf else _NO_SESSION,
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


def device_page(viewer: Viewer, problem: str = "") -> Html:
    """Return the page on which a person types in the code of a command line. `problem`: with the one that they typed in."""
    form = element(
        "form",
        element("input", type="hidden", name="csrf", value=viewer.csrf),
        element("label", "Code", for_="code"),
        element(
            "input",
            id="code",
            name="code",
            required=True,
            autocomplete="off",
            autocapitalize="characters",
            spellcheck="false",
            maxlength="32",
        ),
        element("button", "Continue", type="submit", class_="primary"),
        method="post",
        action="/device",
    )
    return document(
        "login",
        "Command line",
        element("p", "Type in the code that ", element("code", "phalanx login"), " shows on the other machine."),
        element("p", problem, class_="problem", role="alert") if problem else "",
        form if viewer.csrf else _NO_SESSION,
        viewer=viewer,
    )


def device_login_page(path: str, code: str, note: str, address: str, viewer: Viewer) -> Html:
    """Return the page that asks whether a waiting command line may have a token."""
    form = element(
        "form",
        element("input", type="hidden", name="csrf", value=viewer.csrf),
        element("button", "Give it a token", type="submit", name="answer", value="allow", class_="primary"),
        " ",
        element("button", "Refuse", type="submit", name="answer", value="refuse"),
        method="post",
        action=path,
    )
    return document(
        "login",
        "Command line",
        element(
            "p",
            "A command line at the address ",
            element("strong", address),
            " asks for a token of ",
            element("strong", viewer.user),
            ".",
        ),
        element("p", "It says of itself: ", element("strong", note or "nothing"), "."),
        element("p", "Go on only if you have just started it yourself, and if it shows this code:"),
        element("p", element("strong", code, class_="word")),
        form if viewer.csrf else _NO_SESSION,
        viewer=viewer,
    )


def device_done_page(note: str, *, allowed: bool, assets: str) -> Html:
    """Return the page after the answer."""
    if not allowed:
        return plain_document("Command line", element("p", "Refused. The command line gets no token."), assets=assets)
    return plain_document(
        "Command line",
        element("p", "The command line continues. You can close this page."),
        element(
            "p",
            "Its token is called: ",
            element("strong", note or "without a note"),
            ". ",
            element("code", "phalanx tokens"),
            " lists and revokes it.",
        ),
        assets=assets,
    )
