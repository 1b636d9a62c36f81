"""The head's own pages around web programs of jobs: on the way to one, and when it cannot be shown."""

from __future__ import annotations

from phalanx.core.errors import PhalanxError
from phalanx.web.command_hints import render_hint
from phalanx.web.document import plain_document
from phalanx.web.html import Html, element


def leading_page(url: str, *, assets: str) -> Html:
    """Return a page that leads on to a program at once."""
    onward = element("meta", http_equiv="refresh", content=f"0;url={url}")
    return plain_document(
        "Opening", element("p", element("a", "Open the program", href=url)), assets=assets, more=onward
    )


def asking_page(path: str, *, assets: str) -> Html:
    """Return the question whether to open a program to which a page of another site links. `path`: of this head."""
    asked = element("p", "Another site or program links to a program of a job on this head: ", element("code", path))
    go = element("p", element("a", "Open it", href=path, class_="button"))
    return plain_document("Open a program of a job?", asked, go, assets=assets)


def sign_in_again_page(url: str, *, assets: str) -> Html:
    """Return a page for a browser that is not let in (any more). `url`: where it begins, at the head."""
    why = element("p", "Your session has ended, or another page led here.", class_="problem", role="alert")
    go = element("p", element("a", "Open it at the head", href=url, class_="button"))
    return plain_document("This program is not open", why, go, assets=assets)


def problem_page(error: PhalanxError, *, assets: str, again_s: int | None = None) -> Html:
    """Return the page of a program that cannot be shown. `again_s`: after how many seconds the browser tries again; None for never."""
    again = None if again_s is None else element("meta", http_equiv="refresh", content=str(again_s))
    return plain_document(
        "The program cannot be shown",
        element("p", error.message, class_="problem", role="alert"),
        element("p", render_hint(error.hint)) if error.hint else None,
        element("p", "This page tries again by itself.") if again_s is not None else None,
        assets=assets,
        more=again,
    )
