"""A small CA, made when a head first listens off loopback, and the certificates that it signs.

The CA's key never leaves the head's state folder. Joining servers verify the CA by its fingerprint, which a person copies. Each
certificate is for one address and is made again at every start, so that a changed address needs no action.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phalanx.app.state_folder import StateFolder
from phalanx.durable_files import make_directory
from phalanx.ports.engine import SignedCertificate

CA_DAYS: Final = 3650  # every server stores the fingerprint: after a new CA all servers must join again
CERTIFICATE_DAYS: Final = 397  # the longest lifetime that common TLS stacks accept; certificates are made at each start
_BACKDATED: Final = datetime.timedelta(hours=1)  # clocks of servers differ
_ONE_DAY: Final = datetime.timedelta(days=1)
_PEM: Final = serialization.Encoding.PEM


class CertificateAuthority:
    """The CA of one state folder: `tls/ca.pem` and `tls/ca.key`, created at the first use."""

    def __init__(self, home: StateFolder, now: datetime.datetime | None = None) -> None:
        self._home = home
        self._now = now
        make_directory("tls.open", home.path_of("tls"))
        try:
            with open(home.path_of("tls", "ca.key"), "rb") as file:
                key = serialization.load_pem_private_key(file.read(), password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            with open(self.ca_file, "rb") as file:
                self._key, self._certificate = key, x509.load_pem_x509_certificate(file.read())
        except FileNotFoundError:
            self._key, self._certificate = self._make()

    @property
    def ca_file(self) -> str:
        """The path of the CA's certificate."""
        return self._home.path_of("tls", "ca.pem")

    @property
    def ca_pem(self) -> str:
        """The CA's certificate, in PEM form."""
        return self._certificate.public_bytes(_PEM).decode("ascii")

    def sign(self, names: list[str]) -> SignedCertificate:
        """Make a key and certificate for a server with these addresses and names, valid for both ends of a connection."""
        key = ec.generate_private_key(ec.SECP256R1())
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        built = (
            self._builder(_common(f"phalanx {names[0]}"), self._certificate.subject, key, CERTIFICATE_DAYS)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(both, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return SignedCertificate(
            key_pem=_key_pem(key), certificate_pem=built.public_bytes(_PEM).decode("ascii") + self.ca_pem
        )

    def write(self, stem: str, signed: SignedCertificate) -> tuple[str, str]:
        """Write a key and certificate into `tls/`, and return the paths of certificate and key."""
        self._home.write_private(f"tls/{stem}.pem", signed.certificate_pem)
        self._home.write_private(f"tls/{stem}.key", signed.key_pem)
        return self.files(stem)

    def files(self, stem: str) -> tuple[str, str]:
        """Return the paths of a certificate and of its key."""
        return self._home.path_of("tls", f"{stem}.pem"), self._home.path_of("tls", f"{stem}.key")

    def _make(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _common(f"phalanx CA of {socket.gethostname()}")
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            self._builder(name, name, key, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        # The key first: a CA certificate without its key could not sign anything.
        self._home.write_private("tls/ca.key", _key_pem(key))
        self._home.write_private("tls/ca.pem", certificate.public_bytes(_PEM).decode("ascii"))
        return key, certificate

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
    ) -> x509.CertificateBuilder:
        now = self._now or datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(now + days * _ONE_DAY)
        )


def _common(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # X.520 limits it to 64 characters


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode("ascii")
