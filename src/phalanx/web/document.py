"""The document around each page: its head, navigation and sign-out; the sign-in page; the page of an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.web.assets import modules_of
from phalanx.web.html import Child, Html, element, join, page_path

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
PAGES: Final = {
    "fleet": "Fleet",
    "jobs": "Jobs",
    "services": "Services",
    "queues": "Queues",
    "nodes": "Nodes",
    "use": "Use",
    "plan": "Plan",
    "what-if": "What if",
    "audit": "Audit",
    "settings": "Settings",
}

RIGHTS: Final = {"audit": "administer", "what-if": "submit"}  # pages that need more than the right to see


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Who sees a page.

    Attributes:
        csrf: of the browser's session; empty if the request carried a token, and then the page cannot change anything.
        assets: path of the folder with scripts and styles.
    """

    user: str
    role: str
    csrf: str
    assets: str
    actions: tuple[str, ...] = ()


def document(page: str, title: str, *content: Child, viewer: Viewer) -> Html:
    """Return a page of a signed-in user. `page` is its key in PAGES, or a page below it, as "job"."""
    seen = {key: name for key, name in PAGES.items() if RIGHTS.get(key, "see") in viewer.actions}
    links = [
        element(
            "a",
            name,
            href=page_path(*(() if key == "fleet" else (key,))),
            aria_current="page" if page.removesuffix("s") == key.removesuffix("s") else None,
        )
        for key, name in seen.items()
    ]
    leave = element(
        "form",
        element("input", type="hidden", name="csrf", value=viewer.csrf),
        element("span", f"{viewer.user} ({viewer.role})", class_="who"),
        element("button", "Sign out", type="submit") if viewer.csrf else None,
        method="post",
        action="/sign-out",
        class_="leave",
    )
    header = element(
        "header",
        element("a", "Skip to content", href="#content", class_="skip"),
        element("span", "Phalanx", class_="brand"),
        element("nav", links, aria_label="Pages"),
        element("span", class_="connection", role="status"),
        leave,
    )
    main = element("main", element("h1", title), *content, id="content", tabindex="-1")
    return _html(
        title,
        join(header, main),
        assets=viewer.assets,
        page=page,
        csrf=viewer.csrf,
        actions=" ".join(viewer.actions),
    )


def sign_in_document(
    *, assets: str, message: str = "", hint: str = "", next_path: str = "/", provider: str = "", elsewhere: str = ""
) -> Html:
    """Return the sign-in page. `message` says why a sign-in failed; `next_path` is where a sign-in leads.

    `provider`: the name of the sign-in provider; `elsewhere`: the address of the head from which people sign in there, if not this one.
    """
    form = element(
        "form",
        element("input", type="hidden", name="next", value=next_path),
        element("label", "API token", for_="token"),
        element(
            "input", type="password", name="token", id="token", required=True, autocomplete="off", spellcheck="false"
        ),
        element("button", "Sign in", type="submit", class_="primary"),
        method="post",
        action="/sign-in",
    )
    how = element(
        "p",
        "Or run ",
        element("code", "phalanx dashboard"),
        " where the command line works: it opens a link that signs you in once.",
    )
    ask = element("p", "No token? Ask an admin, who runs ", element("code", "phalanx tokens add --user NAME"), ".")
    main = element(
        "main",
        element("h1", "Phalanx"),
        element("p", join(element("strong", message), f" {hint}" if hint else ""), class_="problem", role="alert")
        if message
        else None,
        _provider_link(provider, elsewhere, next_path) if provider else None,
        form,
        how,
        None if provider else ask,
        id="content",
        class_="sign-in",
    )
    return _html("Sign in", main, assets=assets, page="sign-in")


def _provider_link(provider: str, elsewhere: str, next_path: str) -> Html:
    if elsewhere:
        return element("p", "To sign in with ", provider, ", open ", element("code", elsewhere), " in the browser.")
    path = page_path("sign-in", "provider", next=next_path)
    return element("p", element("a", f"Sign in with {provider}", href=path, class_="button"))


def leading_document(path: str, *, assets: str) -> Html:
    """Return a page that leads on to a path of this head at once, as a request of this head's own page."""
    onward = element("meta", http_equiv="refresh", content=f"0;url={path}")
    return plain_document("Phalanx", element("p", element("a", "Continue", href=path)), assets=assets, more=onward)


def plain_document(title: str, *content: Child, assets: str, more: Html | None = None) -> Html:
    """Return a page without navigation, as of the sign-in. `more`: for its head."""
    main = element("main", element("h1", title), *content, id="content", class_="sign-in")
    return _html(title, main, assets=assets, page="sign-in", more=more)


def error_document(error: PhalanxError, *, assets: str) -> Html:
    """Return the page of an error."""
    main = element(
        "main",
        element("h1", "This page cannot be shown"),
        element("p", error.message, class_="problem", role="alert"),
        element("p", str(error.hint)) if error.hint else None,
        element("p", element("a", "Back to the fleet", href="/")),
        id="content",
        class_="sign-in",
    )
    return _html("Error", main, assets=assets, page="error")


def _html(
    title: str, body: Html, *, assets: str, page: str, csrf: str = "", actions: str = "", more: Html | None = None
) -> Html:
    head = element(
        "head",
        more,
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="csrf", content=csrf) if csrf else None,
        element("title", f"{title} - Phalanx"),
        element("link", rel="icon", href=f"{assets}/icon.svg", type="image/svg+xml"),
        element("link", rel="stylesheet", href=f"{assets}/dashboard.css"),
        [element("link", rel="modulepreload", href=f"{assets}/{name}") for name in modules_of(page)] if csrf else None,
        element("script", src=f"{assets}/dashboard.js", type="module") if csrf else None,
    )
    whole = element("html", head, element("body", body, data_page=page, data_actions=actions or None), lang="en")
    return Html("<!doctype html>\n" + whole)
