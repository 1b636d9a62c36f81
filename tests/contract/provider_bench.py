"""A head that signs people in at a real provider, for the tests of that: the way there and back as browsers go it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import html
import itertools
import os
import re
from contextlib import contextmanager
from urllib.parse import urlencode, urlsplit

import httpx

from tests import oidc_here
from tests.contract.api_head import ApiHead

GROUPS = [
    {"group": "ml", "role": "user", "projects": ["nlp"]},
    {"group": "ops", "role": "operator"},
    {"group": "leads", "admin_of": ["nlp"]},
]
AWAY = httpx.Client(trust_env=False, verify=False)  # the browser at the other site
NUMBERS = itertools.count(1)


@contextmanager
def head_with_secret(home):
    """A head with the client's secret in its folder."""
    folder = home / "secrets"
    folder.mkdir()
    (folder / "oidc").write_text(f"{oidc_here.CLIENT_SECRET}\n")
    os.chmod(folder / "oidc", 0o600)
    head = ApiHead(str(home))
    try:
        yield head
    finally:
        head.close()


def fresh(served, head):
    """The provider as new, with the head's clock and a new person, of the group ml."""
    served.__init__(served.issuer, served.first_key)  # the head may know the key already
    served.now_s = head.clock.now_s
    served.add(f"ann{next(NUMBERS)}", "ml", "staff")
    return served


def set_provider(call, provider, **changes):
    """Set the provider at the head."""
    assert call("admin", "PUT", "/v1/projects/nlp", {}).status_code == 200
    provider.redirects.add(f"{call.url}/sign-in/return")
    body = {"issuer": provider.issuer, "client_id": oidc_here.CLIENT_ID, "secret_file": "oidc", "url": call.url}
    body["user_claim"] = "preferred_username"
    reply = call("admin", "PUT", "/v1/sign-in", {**body, "groups": GROUPS, **changes})
    assert reply.status_code == 200, reply.text
    return reply.json()


def begin(browser, next_path="/"):
    """The address at the provider to which the head leads."""
    reply = browser("GET", f"/sign-in/provider?{urlencode({'next': next_path})}", sec_fetch_site="same-origin")
    assert reply.status_code == 303, reply.text
    return reply.headers["location"]


def visit(address):
    """The path at the head to which the provider leads back."""
    reply = AWAY.get(address)
    assert reply.status_code == 302, reply.text
    parts = urlsplit(reply.headers["location"])
    return f"{parts.path}?{parts.query}"


def come_back(browser, path):
    """Open the page to which the provider leads, as browsers do: from another site, so without cookies. Follow where it leads."""
    kept, browser.cookies = browser.cookies, {}
    reply = browser("GET", path, sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="document")
    assert (reply.status_code, browser.cookies) == (200, {})
    browser.cookies = kept
    onward = html.unescape(re.search(r'http-equiv="refresh" content="0;url=([^"]+)"', reply.text)[1])
    assert onward.startswith("/sign-in/finish?")
    return browser("GET", onward, sec_fetch_site="same-origin")


def sign_in(browser, next_path="/"):
    return come_back(browser, visit(begin(browser, next_path)))


def refused(reply, *words):
    """It is the sign-in page with these words, and there is no session."""
    assert reply.status_code in (401, 403, 503), reply.status_code
    assert 'role="alert"' in reply.text
    for word in words:
        assert word in html.unescape(reply.text), reply.text
    assert "phalanx-session" not in reply.headers.get("set-cookie", "")
    return True


def audit(head):
    return [(line.user, line.action, line.result, line.detail) for line in head.store.audit(after=None)]
