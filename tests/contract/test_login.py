"""A command line gets a token by a code that a person types in at the provider, or by a code that their browser brings."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import asyncio
import html
import re
import secrets
import socket
import threading

import httpx
import pytest

from phalanx.api.auth.browser_sessions import CODE_LIFETIME_S, code_challenge
from phalanx.api.auth.device_logins import LIFETIME_S, WAITING_PER_ADDRESS, WRONG_CODES_MAX
from phalanx.api.runtime import runtime_of_app
from phalanx.cli.access import login as login_command
from phalanx.cli.root import main
from phalanx.client import Client
from phalanx.client.connection.clusters import read_clusters
from phalanx.core.errors import TryLater, Unreachable
from phalanx.core.state.events import PutToken
from phalanx.core.work.sign_in import RECHECK_S
from tests import oidc_here
from tests.contract.api_head import TOKENS, code, token_of, until
from tests.contract.provider_bench import audit, fresh, head_with_secret, set_provider, sign_in
from tests.contract.test_dashboard_sign_in import Browser, link

DAY_S = 86400.0
VERIFIER = "v" * 43
CHALLENGE, STATE = code_challenge(VERIFIER), "s" * 22
PATH = f"/login/50000/{CHALLENGE}/{STATE}"


@pytest.fixture(scope="module")
def served():
    with oidc_here.provider() as served:
        yield served


@pytest.fixture
def head(tmp_path):
    with head_with_secret(tmp_path) as head:
        yield head


@pytest.fixture
def provider(served, head, call):
    fresh(served, head)
    set_provider(call, served)
    return served


@pytest.fixture
def browser(call):
    return Browser(call.url)


def ask(call, path, **body):
    return call.client.post(f"/v1/login/{path}", json=body)


def allow(browser, path=PATH, **form):
    """Press the button of the page; the code that it shows."""
    reply = browser("POST", path, form={"csrf": browser.csrf, **form}, origin=browser.url)
    assert reply.status_code == 200, reply.text
    return re.search(r'<code class="word">([^<]+)</code>', reply.text)[1]


def bearer(reply):
    return {"authorization": f"Bearer {reply.json()['secret']}"}


# ---- by a code at the provider ----------------------------------------------------------------------------------------


def test_code_that_a_person_types_in_at_the_provider_gives_a_token_that_ends_when_they_leave(head, call, provider):
    begun = ask(call, "device").json()
    assert (begun["verification_url"], len(begun["user_code"])) == (f"{provider.issuer}/activate", 8)
    assert ask(call, "device/token", handle=begun["handle"]).json()["pending"] is True
    assert not [device for device in provider.devices if device in begun["handle"]]  # it is sealed
    provider.approve_device()
    made = ask(call, "device/token", handle=begun["handle"], note="of a test")
    me = call.client.get("/v1/me", headers=bearer(made)).json()
    assert (me["user"], me["projects"]) == (provider.present, ["nlp"])
    assert made.json()["expires_s"] - head.clock.now_s() == pytest.approx(90 * DAY_S, abs=60)
    lines = [line for line in audit(head) if line[1] == "POST /v1/login/device/token"]
    assert {(line[0], line[2]) for line in lines} == {(provider.present, "done")}
    assert code(ask(call, "device/token", handle=begun["handle"])) == (401, "not_signed_in")  # once
    provider.people[provider.present].left = True
    head.clock.ahead_s = RECHECK_S + 1
    runtime = runtime_of_app(head.app)
    asyncio.run_coroutine_threadsafe(runtime.provider_sign_in.recheck(), runtime._answers.loop).result(60)
    assert call.client.get("/v1/me", headers=bearer(made)).status_code == 401


def test_handle_that_the_head_has_not_made_and_a_person_without_a_group_get_nothing(head, call, provider, browser):
    sign_in(browser)
    sealed = head.store.user(provider.present).identity.sealed  # a refresh token is no handle
    for handle in ("", "x", sealed, TOKENS["admin"]):
        assert code(ask(call, "device/token", handle=handle)) == (401, "not_signed_in")
    provider.add("eve", "staff")
    handle = ask(call, "device").json()["handle"]
    provider.approve_device()
    assert code(ask(call, "device/token", handle=handle)) == (403, "not_permitted")
    refusal = ("unknown", "POST /v1/login/device/token", "not_permitted")
    until(lambda: refusal in [line[:3] for line in audit(head)])
    provider.without.add("device_authorization_endpoint")
    assert call("admin", "POST", "/v1/sign-in/check").status_code == 200
    own = ask(call, "device").json()  # of the head
    assert (own["verification_url"], own["expires_in_s"]) == ("/device", LIFETIME_S)


def test_command_saves_the_token_with_the_cluster(call, provider, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(login_command.time, "sleep", lambda _: provider.approve_device())
    opened = []
    monkeypatch.setattr(login_command, "open_browser", opened.append)
    assert main(["login", call.url, "--name", "prod"]) == 0
    (cluster,) = read_clusters().clusters.values()
    assert (cluster.name, cluster.url, cluster.user, read_clusters().current) == (
        "prod",
        call.url,
        provider.present,
        "prod",
    )
    me = call.client.get("/v1/me", headers={"authorization": f"Bearer {cluster.token}"})
    assert me.json()["user"] == provider.present
    told = capsys.readouterr()
    assert cluster.token not in told.out + told.err
    assert "user_code=" in opened[0]
    assert main(["config", "remove", "prod", "--revoke"]) == 0
    assert read_clusters().clusters == {}
    assert call.client.get("/v1/me", headers={"authorization": f"Bearer {cluster.token}"}).status_code == 401


# ---- by a code at the head ---------------------------------------------------------------------------------------------


def decide(browser, typed, answer="allow"):
    """Type a code in at the page, and answer its question; the last page."""
    found = browser("POST", "/device", form={"csrf": browser.csrf, "code": typed}, origin=browser.url)
    assert found.status_code == 303, found.text
    asked = browser("GET", found.headers["location"])
    assert asked.status_code == 200, asked.text
    form = {"csrf": browser.csrf, "answer": answer}
    return asked.text, browser("POST", found.headers["location"], form=form, origin=browser.url)


def test_code_that_a_signed_in_person_confirms_gives_one_token_named_after_the_machine(head, call, browser):
    browser.sign_in()
    begun = ask(call, "device", note="phalanx login on <b>lap\x1btop").json()
    assert re.fullmatch(r"[BCDFGHJKLMNPQRSTVWXZ]{4}-[BCDFGHJKLMNPQRSTVWXZ]{4}", begun["user_code"])
    assert ask(call, "device/token", handle=begun["handle"]).json()["pending"] is True
    asked, done = decide(browser, begun["user_code"].lower().replace("-", " "))
    assert "phalanx login on &lt;b&gt;lap?top" in asked
    assert "127.0.0.1" in asked
    assert done.status_code == 200
    assert begun["handle"] not in asked + done.text
    made = ask(call, "device/token", handle=begun["handle"], note="phalanx login on laptop")
    assert call.client.get("/v1/me", headers=bearer(made)).json()["user"] == "ada"
    assert made.json()["expires_s"] - head.clock.now_s() == pytest.approx(90 * DAY_S, abs=60)
    assert code(ask(call, "device/token", handle=begun["handle"])) == (401, "not_signed_in")  # once
    mine = [one for one in call("user", "GET", "/v1/tokens").json()["tokens"] if one["id"] == made.json()["token_id"]]
    assert [one["note"] for one in mine] == ["phalanx login on laptop"]
    assert ("ada", "POST /v1/login/device/token", "done") in [line[:3] for line in audit(head)]
    assert call("user", "DELETE", f"/v1/tokens/{made.json()['token_id']}").status_code == 204
    assert call.client.get("/v1/me", headers=bearer(made)).status_code == 401


def test_refused_late_and_unknown_codes_give_nothing(head, call, browser):
    browser.sign_in()
    refused, late = ask(call, "device").json(), ask(call, "device").json()
    assert "Refused" in decide(browser, refused["user_code"], "refuse")[1].text
    assert code(ask(call, "device/token", handle=refused["handle"])) == (403, "not_permitted")
    again = browser(
        "POST", f"/device/{refused['user_code']}", form={"csrf": browser.csrf, "answer": "allow"}, origin=browser.url
    )
    assert again.status_code == 404
    csrf = browser.csrf
    for form in ({"answer": "perhaps"}, {}, {"answer": "allow", "csrf": "guessed"}):
        reply = browser("POST", f"/device/{late['user_code']}", form={"csrf": csrf, **form}, origin=browser.url)
        assert reply.status_code == (403 if "csrf" in form else 400)
    head.clock.ahead_s = LIFETIME_S + 1
    assert browser("GET", f"/device/{late['user_code']}").status_code == 404
    assert code(ask(call, "device/token", handle=late["handle"])) == (401, "not_signed_in")
    for handle in ("", "x", late["user_code"], "é" * 5000, TOKENS["admin"]):
        assert code(ask(call, "device/token", handle=handle)) == (401, "not_signed_in")


def test_guessing_codes_and_flooding_the_page_ends_soon(head, call, browser):
    browser.sign_in()
    csrf, begun = browser.csrf, ask(call, "device").json()
    for _ in range(WRONG_CODES_MAX):
        reply = browser("POST", "/device", form={"csrf": csrf, "code": "BBBB-BBBB"}, origin=browser.url)
        assert (reply.status_code, "no command line waits with this code" in reply.text) == (404, True)
    for path in ("/device", f"/device/{begun['user_code']}"):  # the right code no longer helps
        form = {"csrf": csrf, "code": begun["user_code"], "answer": "allow"}
        assert browser("POST", path, form=form, origin=browser.url).status_code == 503
    for _ in range(WAITING_PER_ADDRESS - 1):
        assert ask(call, "device").status_code == 200
    assert code(ask(call, "device")) == (503, "try_later")
    head.clock.ahead_s = LIFETIME_S + 1
    decide(browser, ask(call, "device").json()["user_code"])


def test_page_is_for_people_who_may_make_tokens_and_leads_back_after_the_sign_in(head, call, browser):
    typed = ask(call, "device").json()["user_code"]
    for path in ("/device", f"/device/{typed}"):
        assert browser("GET", path).status_code == 401
        assert f'value="{path}"' in browser("GET", path).text
        assert browser("POST", path, form={"csrf": "", "answer": "allow"}, origin=browser.url).status_code == 401
        assert browser("GET", path, origin="http://evil.example").status_code == 403
    head.ask(PutToken(token=token_of("root", "only looks", scope=frozenset({"see"}))))
    browser.sign_in("only looks")
    form = {"csrf": browser.csrf, "answer": "allow"}
    assert browser("POST", f"/device/{typed}", form=form, origin=browser.url).status_code == 403
    ends_s = head.clock.now_s() + 3600.0
    head.ask(PutToken(token=token_of("root", "ends soon", scope=frozenset({"see", "own_tokens"}), expires_s=ends_s)))
    browser.sign_in("ends soon")
    begun = ask(call, "device").json()
    decide(browser, begun["user_code"])
    made = ask(call, "device/token", handle=begun["handle"])
    assert made.json()["expires_s"] == ends_s
    assert call.client.get("/v1/me", headers=bearer(made)).json()["scope"] == ["own_tokens", "see"]


def test_command_waits_for_the_page_and_saves_the_token(call, browser, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    browser.sign_in()
    monkeypatch.setattr(login_command, "open_browser", lambda _: False)
    told = []

    def wait(_):
        if not told:
            told.append(capsys.readouterr().err)
            decide(browser, re.search(r"code: (\S+)", told[0])[1])

    monkeypatch.setattr(login_command.time, "sleep", wait)
    assert main(["login", call.url, "--name", "lab"]) == 0
    assert f"next: type it in at {call.url}/device within 10m00s\n" in told[0]
    assert (read_clusters().clusters["lab"].user, read_clusters().current) == ("ada", "lab")
    assert main(["config", "rename", "lab", "prod"]) == 0
    assert main(["config", "rename", "lab", "prod"]) == 64
    assert main(["config", "rename", "prod", "../x"]) == 64
    assert (list(read_clusters().clusters), read_clusters().current) == (["prod"], "prod")


def test_command_says_once_that_the_head_is_silent_and_goes_on_when_it_answers(
    call, browser, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    browser.sign_in()
    shown, failures = [], [Unreachable("the head does not answer"), TryLater("many people sign in")]
    finish = Client.finish_device_login

    def answer(head, handle, note):
        if failures:
            raise failures[0] if len(shown) < 3 else failures.pop()
        return finish(head, handle, note)

    def wait(_):
        shown.append(capsys.readouterr().err)
        if len(shown) == 1:
            decide(browser, re.search(r"code: (\S+)", shown[0])[1])

    monkeypatch.setattr(login_command, "open_browser", lambda _: False)
    monkeypatch.setattr(Client, "finish_device_login", answer)
    monkeypatch.setattr(login_command.time, "sleep", wait)
    assert main(["login", call.url]) == 0
    again = "; trying again until the code expires\n"
    assert shown[1:] == [
        f"the head does not answer{again}",
        "",
        f"many people sign in{again}",
        f"the head does not answer{again}",
    ]


# ---- by a browser -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--browser"], []])
def test_command_says_at_once_what_a_head_without_a_provider_asks_for(call, served, head, words, monkeypatch, capsys):
    def person(*_):
        raise KeyboardInterrupt

    def shown():
        assert main(["login", call.url, *words]) != 0
        return capsys.readouterr().err

    monkeypatch.setattr(login_command.select, "select", person)
    monkeypatch.setattr(login_command.time, "sleep", person)
    told = shown()
    assert "no sign-in provider: its page asks for an API token" in told
    assert "phalanx tokens add --user NAME" in told
    assert "within 10m00s" in told
    assert "phalanx tokens add --user NAME" in Browser(call.url)("GET", PATH).text
    fresh(served, head)
    set_provider(call, served)
    assert "API token" not in shown()
    assert "tokens add" not in Browser(call.url)("GET", PATH).text


@pytest.mark.parametrize("words", [["--browser"], []])
def test_command_waits_for_no_head_that_does_not_answer(words, monkeypatch, capsys):
    monkeypatch.setattr(login_command, "open_browser", pytest.fail)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it never listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["login", url, *words]) == Unreachable.exit_code
    told = capsys.readouterr().err
    assert f"the head at {url} does not answer" in told
    assert "next:" not in told


def test_browser_gives_a_token_once_to_who_has_the_verifier(head, call, provider, browser):
    sign_in(browser)
    shown = browser("GET", PATH)
    assert provider.present in shown.text
    made = ask(call, "token", code=allow(browser), verifier=VERIFIER)
    assert made.status_code == 200, made.text
    assert call.client.get("/v1/me", headers=bearer(made)).json()["user"] == provider.present
    assert made.json()["expires_s"] - head.clock.now_s() == pytest.approx(90 * DAY_S, abs=60)  # not 12 h
    given = allow(browser)
    assert code(ask(call, "token", code=given, verifier="w" * 43)) == (401, "not_signed_in")
    assert code(ask(call, "token", code=given, verifier=VERIFIER)) == (401, "not_signed_in")  # the attempt used it up
    late = allow(browser)
    head.clock.ahead_s = CODE_LIFETIME_S + 1
    assert code(ask(call, "token", code=late, verifier=VERIFIER)) == (401, "not_signed_in")


def test_codes_of_links_and_of_logins_are_not_interchangeable(call, browser):
    browser.sign_in()
    path = link(call)
    for verifier in ("", VERIFIER):
        assert code(ask(call, "token", code=path.partition("=")[2], verifier=verifier)) == (401, "not_signed_in")
        path = link(call)
    assert browser("GET", f"/sign-in?code={allow(browser)}").status_code == 401


def test_token_is_no_wider_and_no_longer_than_that_of_the_session(head, call, browser):
    ends_s = head.clock.now_s() + 3600.0
    scope = frozenset({"see", "own_tokens"})
    head.ask(PutToken(token=token_of("root", "narrow and short", scope=scope, expires_s=ends_s)))
    browser.sign_in("narrow and short")
    made = ask(call, "token", code=allow(browser), verifier=VERIFIER)
    assert made.json()["expires_s"] == ends_s
    assert call.client.get("/v1/me", headers=bearer(made)).json()["scope"] == sorted(scope)
    head.ask(PutToken(token=token_of("root", "only to look", scope=frozenset({"see"}))))
    browser.sign_in("only to look")
    assert browser("GET", PATH).status_code == 403
    assert browser("POST", PATH, form={"csrf": browser.csrf}, origin=browser.url).status_code == 403


def test_other_pages_and_other_sessions_get_no_code(call, browser):
    assert browser("GET", PATH).status_code == 401
    assert browser("POST", PATH, form={"csrf": ""}, origin=browser.url).status_code == 401
    browser.sign_in()
    for csrf in ("", "guessed"):
        assert browser("POST", PATH, form={"csrf": csrf}, origin=browser.url).status_code == 403
    for headers in (
        {"origin": "http://evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ):
        assert browser("GET", PATH, **headers).status_code == 403
        assert browser("POST", PATH, form={"csrf": browser.csrf}, **headers).status_code == 403
    for path in (f"/login/80/{CHALLENGE}/{STATE}", f"/login/50000/x/{STATE}", f"/login/50000/{CHALLENGE}/x"):
        assert browser("GET", path).status_code == 400
    assert 'action="/sign-in"' in Browser(call.url)("GET", PATH).text  # it leads back after the sign-in
    assert f'value="{PATH}"' in Browser(call.url)("GET", PATH).text


def test_command_takes_the_code_of_its_own_login_only(call, browser, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    browser.sign_in()
    words = []

    def person(url):
        def go():
            path = url.removeprefix(call.url)
            port = path.split("/")[2]
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as client:
                assert client.get("/", params={"code": "c" * 43, "state": secrets.token_urlsafe(16)}).status_code == 403
            words.append(re.search(r'class="word">(\w{4}-\w{4})<', browser("GET", path).text)[1])
            page = browser("POST", path, form={"csrf": browser.csrf}, origin=browser.url).text
            back = html.unescape(re.search(r'href="(http://127.0.0.1:[^"]+)"', page)[1])
            assert httpx.get(back, trust_env=False, verify=False).status_code == 200

        threading.Thread(target=go, daemon=True).start()
        return True

    monkeypatch.setattr(login_command, "open_browser", person)
    assert main(["login", call.url, "--browser"]) == 0
    (cluster,) = read_clusters().clusters.values()
    assert (cluster.name, cluster.user) == ("127.0.0.1", "ada")
    told = capsys.readouterr().err
    assert words == re.findall(r"word: (\w{4}-\w{4})", told)
    assert cluster.token not in told
