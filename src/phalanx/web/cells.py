"""What tables of all pages show alike: moments, numbers, states; and the part of a page that is kept fresh."""

from __future__ import annotations

import time

from phalanx.web.html import Child, Html, element


def live(*content: Child) -> Html:
    """Return the part of a page that its script replaces by a live view, or loads again when something changed."""
    return element("div", *content, id="live")


def state_word(word: str) -> Html:
    """Return a state as a word in a frame, with the colour of its class."""
    return element("span", word, class_=f"state {word.replace(' ', '-')}")


def number(value: float) -> str:
    """Return a number without needless digits."""
    return f"{value:g}"


def moment(at_s: float | None) -> Html | str:
    """Return a time in UTC, which the script shows in the browser's own time zone."""
    if not at_s:
        return ""
    parts = time.gmtime(at_s)
    return element(
        "time", time.strftime("%Y-%m-%d %H:%M:%S UTC", parts), datetime=time.strftime("%Y-%m-%dT%H:%M:%SZ", parts)
    )
