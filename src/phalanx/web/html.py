"""Builds HTML in which every text is escaped: only `element` makes markup, and names of jobs, nodes and files are plain text to it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final
from urllib.parse import quote

_VOID: Final = frozenset({"input", "link", "meta", "br", "wbr"})
# A browser drops a line break that is the first of their text.
_DROPS_FIRST_BREAK: Final = frozenset({"textarea", "pre"})


class Html(str):
    """Markup that is safe to send."""

    __slots__ = ()


Child = str | Iterable[str] | None


def element(tag: str, /, *children: Child, **attributes: str | bool | None) -> Html:
    """Return an element. Children that are not `Html` are escaped; None, and attributes that are None or False, are left out.

    A trailing underscore of an attribute's name is dropped (`class_`), and other underscores become hyphens.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value), quote=True)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Html(f"<{tag}{written}>")
    start = "\n" if tag in _DROPS_FIRST_BREAK else ""
    return Html(f"<{tag}{written}>{start}{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    """Return the children one after the other, as in `element`."""
    return Html("".join(_markup(child) for child in children if child is not None))


def _markup(child: str | Iterable[str]) -> str:
    if isinstance(child, Html):
        return child
    return escape(child, quote=True) if isinstance(child, str) else join(*child)


def link(text: Child, *path: str, **query: str) -> Html:
    """Return a link to a page of the head: /path/..., each segment and value quoted, so that no name can leave the head."""
    return element("a", text, href=page_path(*path, **query))


def page_path(*path: str, **query: str) -> str:
    """Return the path of a page, each segment and value quoted."""
    found = "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
    # A segment that is "." or ".." would name another page.
    segments = [
        quote(one, safe="").replace(".", "%2E") if one.strip(".") == "" else quote(one, safe="") for one in path
    ]
    return "/" + "/".join(segments) + (f"?{found}" if found else "")


def table(titles: Iterable[Child], rows: Iterable[Iterable[Child]], *, caption: str, empty: str) -> Html:
    """Return a table that scrolls sideways on narrow screens; without rows it says `empty`."""
    body = [element("tr", [element("td", cell) for cell in row]) for row in rows]
    if not body:
        return element("p", empty, class_="empty")
    head = element("thead", element("tr", [element("th", title, scope="col") for title in titles]))
    shown = element("table", element("caption", caption, class_="unseen"), head, element("tbody", body))
    return element("div", shown, class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Return names and values as a list; empty values are left out."""
    shown = [(element("dt", name), element("dd", value)) for name, value in pairs if value]
    return element("dl", [join(*pair) for pair in shown], class_="facts")
