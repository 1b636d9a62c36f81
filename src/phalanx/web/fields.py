"""Fields of forms, each with its label."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.web.html import Html, element


def text_field(title: str, name: str, *, class_: str | None = None, **more: str | bool) -> Html:
    """Return a field for a line of text. `more`: attributes of the input."""
    return element("label", title, element("input", name=name, autocomplete="off", **more), class_=class_)


def choice(title: str, name: str, words: Sequence[str], chosen: str = "") -> Html:
    """Return a choice of words."""
    options = [element("option", word, value=word, selected=word == chosen) for word in words]
    return element("label", title, element("select", options, name=name))


def check(title: str, name: str, value: str, *, checked: bool = False) -> Html:
    """Return a box to check."""
    box = element("input", type="checkbox", name=name, value=value, checked=checked)
    return element("label", box, f" {title}", class_="check")
