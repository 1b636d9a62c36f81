"""Sign-in at the provider in a real Chromium, which decides itself which cookies it sends from which site; without scripts too."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import hashlib
import queue
import threading

import pytest

from phalanx.cli.access import login as login_command
from phalanx.cli.root import main
from phalanx.client.connection.clusters import read_clusters
from tests import axe_here, chromium_here, oidc_here
from tests.contract.provider_bench import fresh, head_with_secret, set_provider
from tests.contract.xss_payloads import PAYLOADS

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium_here.program() is None, reason="no chromium here: make browser-tools"),
]


@pytest.fixture
def head(tmp_path):
    with head_with_secret(tmp_path) as head:
        yield head


@pytest.fixture
def provider(head):
    with oidc_here.provider() as served:
        fresh(served, head)
        served.shows_form = True  # a person clicks, so that the way back begins at a page of another site
        yield served


@pytest.fixture
def page(call, provider):
    set_provider(call, provider)
    with chromium_here.chromium() as page:
        yield page


def troubles(page):
    """Other than statuses of pages that are meant to be refused."""
    return [one for one in page.problems if "Failed to load resource" not in one]


def text(page):
    return page.run("document.body.innerText")


@pytest.mark.parametrize("scripts", [True, False])
def test_person_signs_in_at_the_other_site_and_comes_back_to_the_page_that_they_wanted(call, page, provider, scripts):
    page.send("Emulation.setScriptExecutionDisabled", value=not scripts)
    page.open(f"{call.url}/jobs")
    page.click("a.button")
    page.until("document.querySelector('#in')")
    assert page.run("location.origin") == provider.issuer
    page.click("#in")
    page.until("location.pathname === '/jobs' && document.querySelector('nav')")
    assert page.run("location.search") == ""
    assert page.run("document.cookie") == ""  # out of reach of scripts
    assert provider.present in text(page)
    page.click(".leave button")
    page.until("document.querySelector('#token')")
    assert troubles(page) == []


def test_command_line_gets_its_token_by_the_browser(head, call, page, provider, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    opened = queue.Queue()
    monkeypatch.setattr(login_command, "open_browser", opened.put)
    command = threading.Thread(target=main, args=(["login", call.url, "--browser"],), daemon=True)
    command.start()
    page.open(opened.get(timeout=60))
    page.click("a.button")
    page.until("document.querySelector('#in')")
    page.click("#in")
    page.until("document.querySelector('main form button')")
    page.click("main form button")
    page.until("document.querySelector('code.word')")
    page.click("a.button")
    page.until("document.body.innerText.includes('the command line continues')")
    command.join(timeout=60)
    (cluster,) = read_clusters().clusters.values()
    assert cluster.user == provider.present
    assert head.store.token(hashlib.sha256(cluster.token.encode()).hexdigest()).user == provider.present
    assert troubles(page) == []


def test_link_of_another_site_to_the_head_sends_no_session(call, page, provider):
    """The strict cookie: it is why the way back needs a page of its own."""
    page.open(f"{call.url}/")
    page.click("a.button")
    page.until("document.querySelector('#in')")
    page.click("#in")
    page.until("document.querySelector('nav')")
    provider.page = f'<title>evil</title><a id="in" href="{call.url}/jobs">x</a>'
    page.open(f"{provider.issuer}/evil")
    page.click("#in")
    page.until("location.pathname === '/jobs'")
    assert "pages of other sites may not call this head" in text(page)


def test_error_is_shown_and_names_with_scripts_run_nowhere(call, page, provider):
    for payload in PAYLOADS[::4]:
        provider.change = lambda claims, payload=payload: {**claims, "preferred_username": payload, "groups": [payload]}
        page.open(f"{call.url}/")
        page.click("a.button")
        page.until("document.querySelector('#in')")
        page.click("#in")
        page.until("document.querySelector('.problem')")
        assert "is no name for a user" in text(page)
    assert page.run("window.xss === undefined")
    assert troubles(page) == []


@pytest.mark.skipif(not axe_here.SCRIPT.exists(), reason="no axe-core here: make browser-tools")
def test_axe_has_no_serious_finding_on_the_sign_in_page(call, page, provider):
    page.open(f"{call.url}/")
    assert axe_here.findings(page) == []
