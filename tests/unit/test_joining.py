"""The words of joining: addresses, join tokens, certificates and their fingerprints."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated"

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from phalanx.app.certificates import CertificateAuthority
from phalanx.app.join_service import (
    ListenAddress,
    StoredJoinSalt,
    bind_socket,
    parse_listen,
)
from phalanx.app.state_folder import StateFolder
from phalanx.client.connection.tls import canonical_fingerprint, fetch_ca
from phalanx.core.access.node_tokens import (
    join_expiry,
    join_token,
    node_of_token,
    node_token,
)
from phalanx.core.errors import BadFile, BadRequest, Conflict
from phalanx.engines.ray import redis
from phalanx.wire.head_http import fingerprint

SECRET = b"a secret of this test's head....."


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.5", "10.0.0.5", 7600),
        ("10.0.0.5:7700", "10.0.0.5", 7700),
        ("head.example.org", "head.example.org", 7600),
        ("[fd00::5]:7700", "fd00::5", 7700),
        ("fd00::5", "fd00::5", 7600),
    ],
)
def test_listen_names_an_address_and_perhaps_a_port(text, host, port):
    assert parse_listen(text, 7600) == ListenAddress(host=host, port=port)


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "127.0.0.1", "localhost", "", "10.0.0.5:none", "10.0.0.5:99999"])
def test_what_no_other_server_could_be_told_is_refused(text):
    with pytest.raises(BadRequest):
        parse_listen(text, 7600)


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".example.org"])
def test_a_name_that_no_server_can_have_is_told_in_one_line(name):
    with pytest.raises(Conflict, match="has no address"):
        bind_socket(ListenAddress(host=name, port=0))
    with pytest.raises(BadRequest, match="is not a host name"):
        fetch_ca(name, 7600, "sha256:" + "a" * 64)
    with pytest.raises(BadRequest, match="not an address of the form HOST:PORT"):
        redis.check(f"{name}:6379")


def test_an_address_of_version_six_has_its_brackets_in_the_url():
    assert ListenAddress(host="fd00::5", port=7600).url == "https://[fd00::5]:7600"


def test_a_join_token_says_until_when_it_is_good_and_cannot_be_made_to_say_more():
    token = join_token(SECRET, 1000.0)
    assert join_expiry(SECRET, token) == 1000.0
    assert join_expiry(b"another", token) is None
    assert join_expiry(SECRET, token.replace("1000", "9999")) is None
    for other in ("", "phxj", "phxj.1000", "phxj..", "phxj.x.y", node_token(SECRET, "n0")):
        assert join_expiry(SECRET, other) is None
    assert node_of_token(SECRET, token) is None


def test_another_salt_ends_the_tokens_before_it_also_for_the_head_after_this_one(tmp_path):
    home = StateFolder.open(str(tmp_path))
    salt = StoredJoinSalt.stored(home)
    before = join_token(SECRET, 1000.0, salt.value)
    assert join_expiry(SECRET, before, StoredJoinSalt.stored(home).value) == 1000.0
    salt.renew()
    assert join_expiry(SECRET, before, salt.value) is None
    assert StoredJoinSalt.stored(home).value == salt.value != ""
    assert join_expiry(SECRET, join_token(SECRET, 1000.0, salt.value), StoredJoinSalt.stored(home).value) == 1000.0


def test_the_ca_is_made_once_and_signs_for_an_address(tmp_path):
    home = StateFolder.open(str(tmp_path))
    made = CertificateAuthority(home)
    again = CertificateAuthority(home)
    assert made.ca_pem == again.ca_pem
    signed = x509.load_pem_x509_certificate(again.sign(["10.0.0.5", "gpu0"]).certificate_pem.encode())
    assert signed.issuer == x509.load_pem_x509_certificate(made.ca_pem.encode()).subject
    names = signed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["10.0.0.5", "gpu0"]
    for name in ("ca.key", "ca.pem"):
        assert (tmp_path / "tls" / name).stat().st_mode & 0o077 == 0


def test_a_certificate_outlives_a_clock_that_is_an_hour_ahead(tmp_path):
    now = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    signed = x509.load_pem_x509_certificate(
        CertificateAuthority(StateFolder.open(str(tmp_path)), now).sign(["a"]).certificate_pem.encode()
    )
    assert signed.not_valid_before_utc == now - datetime.timedelta(hours=1)
    assert signed.not_valid_after_utc - now == datetime.timedelta(days=397)


def test_the_fingerprint_is_that_of_the_first_certificate(tmp_path):
    authority = CertificateAuthority(StateFolder.open(str(tmp_path)))
    digest = x509.load_pem_x509_certificate(authority.ca_pem.encode()).fingerprint(SHA256())
    assert fingerprint(authority.ca_pem) == f"sha256:{digest.hex()}"
    assert fingerprint(authority.ca_pem + authority.sign(["a"]).certificate_pem) == f"sha256:{digest.hex()}"
    for nothing in ("", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----", '{"status": "ok"}'):
        with pytest.raises(BadFile):
            fingerprint(nothing)


def test_a_fingerprint_is_taken_in_any_spelling_and_a_short_one_in_none():
    digits = "ab" * 32
    for spelling in (digits, f"sha256:{digits}", f"SHA256:{digits.upper()}", ":".join(["ab"] * 32)):
        assert canonical_fingerprint(spelling) == f"sha256:{digits}"
    for wrong in ("", "sha256:", digits[:-2], digits[:-1] + "g"):
        with pytest.raises(BadRequest):
            canonical_fingerprint(wrong)
