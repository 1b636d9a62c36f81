"""A provider of OpenID Connect for tests: real HTTP, real keys, real tokens. It is strict, unless a test makes it lie.

Its address has the name `localhost`, and heads of tests have 127.0.0.1: for browsers these are two sites.
"""

# mypy: disable-error-code="arg-type, var-annotated, union-attr, attr-defined"

import base64
import hashlib
import json
import secrets
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import pytest

jwt = pytest.importorskip("joserfc.jwt", reason="the extra oidc is not installed here: make install-dev")
jwk = pytest.importorskip("joserfc.jwk")
pytest.importorskip("authlib")

CLIENT_ID, CLIENT_SECRET = "phalanx", "the secret of the client"
TOKEN_LIFE_S = 300
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"


@dataclass
class Person:
    """Somebody at the provider. `more`: further claims."""

    name: str
    groups: list = field(default_factory=list)
    left: bool = False
    more: dict = field(default_factory=dict)

    @property
    def subject(self):
        return hashlib.sha256(self.name.encode()).hexdigest()[:20]


class Provider:
    """The provider's state; tests read and change it.

    Attributes:
        people: by a word that the test chooses; `present` signs in at the next visit.
        change: changes the claims of the next ID tokens; `sign` signs them.
        broken: every answer is an error of the server.
        refuses: the error that the authorization endpoint answers.
        without: names that are left out of the metadata.
        asked: what came to the token endpoint, oldest first.
        page: that of another, hostile site.
        odd: how its metadata are unusable.
        shows_form: the authorization endpoint shows a page with a button, as real providers do.
    """

    def __init__(self, url, key=None):
        self.issuer, self.now_s = url, time.time
        self.key = self.first_key = key or jwk.ECKey.generate_key("P-256", parameters={"kid": "k1"})
        self.people = {}
        self.present = ""
        self.redirects = set()
        self.change, self.sign = None, None
        self.broken, self.refuses, self.without, self.asked, self.shows_form = False, "", set(), [], False
        self.odd = ""
        self.groups_in_userinfo, self.page, self.fails_for = False, "", set()
        self.codes, self.refresh_tokens, self.access_tokens, self.devices = {}, {}, {}, {}

    def add(self, name, *groups, **more):
        """A person, who is present from now on."""
        self.people[name] = Person(name, list(groups), more=more)
        self.present = name
        return self.people[name]

    # ---- endpoints ----------------------------------------------------------------------------------------------------

    def metadata(self):
        at = self.issuer
        found = {
            "issuer": at,
            "authorization_endpoint": f"{at}/authorize",
            "token_endpoint": f"{at}/token",
            "userinfo_endpoint": f"{at}/userinfo",
            "jwks_uri": f"{at}/jwks",
            "device_authorization_endpoint": f"{at}/device",
            "response_types_supported": ["code"],
            "id_token_signing_alg_values_supported": ["ES256"],
            "scopes_supported": ["openid", "profile", "groups", "offline_access"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            "authorization_response_iss_parameter_supported": True,
        }
        return {name: value for name, value in found.items() if name not in self.without}

    def authorize(self, query):
        """The address that leads back; an error of the client if it is not registered."""
        redirect = query.get("redirect_uri", "")
        if query.get("client_id") != CLIENT_ID or redirect not in self.redirects:
            return None
        back = {"state": query["state"], "iss": self.issuer}
        if self.refuses:
            return f"{redirect}?{urlencode({**back, 'error': self.refuses, 'error_description': '<script>x</script>'})}"
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe(24)
        self.codes[code] = {"person": self.present, "query": query, "used": False}
        return f"{redirect}?{urlencode({**back, 'code': code})}"

    def token(self, form, authorization):
        self.asked.append(form)
        wanted = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        if unquote(authorization) != f"Basic {wanted}":
            return 401, {"error": "invalid_client"}
        match form.get("grant_type"):
            case "authorization_code":
                return self._by_code(form)
            case "refresh_token":
                person = self.refresh_tokens.pop(form.get("refresh_token"), None)
                return self._tokens(person, "") if person else (400, {"error": "invalid_grant"})
            case grant if grant == DEVICE_GRANT:
                device = self.devices.get(form.get("device_code"))
                if device is None:
                    return 400, {"error": "expired_token"}
                if not device["person"]:
                    return 400, {"error": "authorization_pending"}
                del self.devices[form["device_code"]]
                return self._tokens(device["person"], "")
        return 400, {"error": "unsupported_grant_type"}

    def _by_code(self, form):
        known = self.codes.get(form.get("code"))
        if known is None or known["used"]:
            return 400, {"error": "invalid_grant", "error_description": "<script>alert(1)</script>"}
        known["used"] = True
        asked = known["query"]
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        if (
            challenge.decode().rstrip("=") != asked["code_challenge"]
            or form.get("redirect_uri") != asked["redirect_uri"]
        ):
            return 400, {"error": "invalid_grant"}
        return self._tokens(known["person"], asked.get("nonce", ""))

    def _tokens(self, name, nonce):
        person = self.people[name]
        if name in self.fails_for:
            return 500, {"error": "server_error"}
        if person.left:
            return 400, {"error": "invalid_grant"}
        access, refresh = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.access_tokens[access], self.refresh_tokens[refresh] = name, name
        tokens = {"access_token": access, "token_type": "Bearer", "expires_in": 300, "refresh_token": refresh}
        if "refresh_tokens" in self.without:
            del tokens["refresh_token"]
        return 200, {**tokens, "id_token": self.id_token(person, nonce)}

    def id_token(self, person, nonce):
        now_s = int(self.now_s())
        claims = {
            "iss": self.issuer,
            "sub": person.subject,
            "aud": CLIENT_ID,
            "iat": now_s,
            "exp": now_s + TOKEN_LIFE_S,
        }
        claims |= {"preferred_username": person.name, **person.more} | ({"nonce": nonce} if nonce else {})
        if not self.groups_in_userinfo:
            claims["groups"] = person.groups
        if self.change is not None:
            claims = self.change(claims)
        if self.sign is not None:
            return self.sign(claims)
        return jwt.encode({"alg": "ES256", "kid": "k1"}, claims, self.key, algorithms=["ES256"])

    def userinfo(self, authorization):
        name = self.access_tokens.get(authorization.removeprefix("Bearer "))
        if name is None:
            return 401, {"error": "invalid_token"}
        person = self.people[name]
        return 200, {"sub": person.subject, "preferred_username": person.name, "groups": person.groups}

    def device(self):
        code, user_code = secrets.token_urlsafe(16), secrets.token_hex(4).upper()
        self.devices[code] = {"person": "", "user_code": user_code}
        at = f"{self.issuer}/activate"
        complete = f"{at}?user_code={user_code}"
        return 200, {
            "device_code": code,
            "user_code": user_code,
            "verification_uri": at,
            "verification_uri_complete": complete,
            "expires_in": 600,
            "interval": 1,
        }

    def approve_device(self):
        """The person present types the code of the only device in."""
        (device,) = self.devices.values()
        device["person"] = self.present


def _handler(provider):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            """Nothing: a query may hold a code."""

        def do_GET(self):
            path = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(path.query).items()}
            if provider.broken:
                self.answer(503, {"error": "temporarily_unavailable"})
            elif path.path == "/.well-known/openid-configuration" and provider.odd == "huge":
                self.answer(200, {**provider.metadata(), "more": "x" * (2 << 20)})
            elif path.path == "/.well-known/openid-configuration" and provider.odd == "elsewhere":
                self.answer(302, "", location=f"{provider.issuer}/metadata")
            elif path.path == "/.well-known/openid-configuration" and provider.odd == "no JSON":
                self.answer(200, "<html>")
            elif path.path == "/.well-known/openid-configuration":
                self.answer(200, provider.metadata())
            elif path.path == "/jwks":
                self.answer(200, {"keys": [provider.key.as_dict(private=False)]})
            elif path.path == "/evil":
                self.answer(200, provider.page, kind="text/html")
            elif path.path == "/userinfo":
                self.answer(*provider.userinfo(self.headers.get("authorization", "")))
            elif path.path == "/authorize" and (back := provider.authorize(query)) is not None:
                if provider.shows_form:
                    page = f'<title>id</title><a id="in" href="{back.replace("&", "&amp;")}">Sign in</a>'
                    self.answer(200, page, kind="text/html")
                else:
                    self.answer(302, "", location=back)
            else:
                self.answer(400, {"error": "invalid_request"})

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            if provider.broken:
                self.answer(503, {"error": "temporarily_unavailable"})
            elif self.path == "/token":
                self.answer(*provider.token(form, self.headers.get("authorization", "")))
            elif self.path == "/device":
                self.answer(*provider.device())
            else:
                self.answer(404, {"error": "not_found"})

        def answer(self, status, body, kind="application/json", location=None):
            payload = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(payload)))
            if location is not None:
                self.send_header("location", location)
            self.end_headers()
            self.wfile.write(payload)

    return Handler


@contextmanager
def provider():
    """A provider on a free port of loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.daemon_threads = True
    found = Provider(f"http://localhost:{server.server_address[1]}")
    server.RequestHandlerClass = _handler(found)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)
