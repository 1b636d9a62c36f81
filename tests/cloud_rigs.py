"""Clouds for contract tests: a provider of ours, and a server in this process that answers as the cloud's reference says (`benchmarks.clouds`)."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import json
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from benchmarks.clouds import azure_dialect, google_dialect
from benchmarks.clouds.cloud_faults import CloudFaults
from benchmarks.clouds.dialect_server import DialectCall, make_dialect, serve
from phalanx.ports.engine import MachineJoin
from phalanx.ports.provider import NodeOrder
from phalanx.providers.azure import arm
from phalanx.providers.azure import rights as azure_rights
from phalanx.providers.azure.credentials import AUTHORITY_VARIABLE
from phalanx.providers.azure.provider import AzureProvider
from phalanx.providers.google import compute as google_compute
from phalanx.providers.google import rights
from phalanx.providers.google.credentials import open_credentials
from phalanx.providers.google.provider import GoogleProvider

OWNER = "0123456789abcdef"


class ScriptedFaults(CloudFaults):
    """No chance: the next changing call meets the fault that a test names."""

    def __init__(self):
        super().__init__(seed=1, faults=0.0)
        self.next_fault = ""

    def deliver(self, carry_out, throttled, *, changes, calm=False):
        fault, self.next_fault = (self.next_fault, "") if changes else ("", self.next_fault)
        match fault:
            case "throttled":
                return throttled()
            case "lost before":
                return None
            case "lost after":
                carry_out(False)
                return None
            case "twice":
                carry_out(False)
            case _:
                pass
        return carry_out(True)


class CloudRig:
    """One cloud and one provider.

    Attributes:
        settings: of a pool that the cloud accepts; `template`, `zones`: likewise.
        offers: two texts of offers.
        codes: what the cloud says if there is no capacity, and no quota.
        right: one that the provider needs; None if keys of this cloud have none.
        spoil_credentials, drop_credentials: make them wrong, or missing; `revoke`: takes a right.
    """

    def __init__(self, name, provider, dialect, server, **words):
        self.name, self.provider, self.dialect, self.server = name, provider, dialect, server
        self.settings, self.template, self.zones = words["settings"], words["template"], words["zones"]
        self.offers, self.codes = words["offers"], words["codes"]
        self.right, self.revoke = words.get("right"), words.get("revoke")
        self.spoil_credentials, self.drop_credentials = words["spoil_credentials"], words["drop_credentials"]
        self.seen: list[DialectCall] = []  # calls, as they arrived
        answer = dialect.answer

        def recorded(call):
            self.seen.append(call)
            return answer(call)

        dialect.answer = recorded

    @property
    def faults(self):
        return self.dialect.faults

    def order(self, number=0, **fields):
        settings = {**self.settings, **fields.pop("settings", {})}
        return NodeOrder(
            **{
                "node_id": f"p-{number}",
                "token": f"p-{number}-k7-{number}",
                "template": self.template,
                "pool": "p",
                "offer": self.offers[0],
            }
            | fields,
            settings=settings,
        )

    def running(self):
        return sorted(one["machine"] for one in self.faults.machines.values() if one["until_s"] is None)


def head(listens=True):
    return SimpleNamespace(
        derive_id=lambda purpose: OWNER * 4,
        machine_join=(lambda node, order: MachineJoin(address="h:1", token=f"t-{order}", fingerprint="f"))
        if listens
        else None,
    )


@cache
def private_key_pem():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def write_google_key(path, port, client="campaign"):
    """Write the key file of a service account whose tokens a server on this port gives."""
    path.write_text(
        json.dumps(
            {
                "type": "service_account",
                "project_id": google_dialect.PROJECT,
                "private_key_id": "1",
                "private_key": private_key_pem(),
                "client_email": f"{client}@{google_dialect.PROJECT}.iam.gserviceaccount.com",
                "token_uri": f"http://127.0.0.1:{port}/token",
            }
        )
    )
    return path


def google_environment(key, port):
    base = f"http://127.0.0.1:{port}"
    return {
        "GOOGLE_APPLICATION_CREDENTIALS": str(key),
        google_compute.ENDPOINT_VARIABLE: f"{base}/compute/v1/",
        google_compute.PROJECTS_VARIABLE: base,
    }


def _google(server, dialect, tmp_path, monkeypatch):
    port = server.server_address[1]
    open_credentials.cache_clear()
    key = write_google_key(tmp_path / "key.json", port)
    for name, value in google_environment(key, port).items():
        monkeypatch.setenv(name, value)

    def spoil():
        write_google_key(key, port, client="wrong")
        open_credentials.cache_clear()

    def drop():
        key.unlink()
        open_credentials.cache_clear()

    def revoke(right):
        dialect.permissions = set(rights.NEEDED) - {right}

    return CloudRig(
        "google",
        GoogleProvider(head=head()),
        dialect,
        server,
        settings={"project": google_dialect.PROJECT, "image": f"projects/{google_dialect.PROJECT}/global/images/node"},
        template="g2-standard-4",
        zones=("us-central1-a", "us-central1-b"),
        offers=("us-central1-a g2-standard-4 on-demand", "us-central1-b g2-standard-4 on-demand"),
        codes=("ZONE_RESOURCE_POOL_EXHAUSTED", "QUOTA_EXCEEDED"),
        right="compute.instances.delete",
        revoke=revoke,
        spoil_credentials=spoil,
        drop_credentials=drop,
    )


def azure_environment(port):
    base = f"http://127.0.0.1:{port}"
    return {
        "AZURE_TENANT_ID": "campaign-tenant",
        "AZURE_CLIENT_ID": "campaign-client",
        "AZURE_CLIENT_SECRET": azure_dialect.SECRET,
        AUTHORITY_VARIABLE: base,
        arm.ENDPOINT_VARIABLE: base,
    }


AZURE_SETTINGS = {
    "subscription": azure_dialect.SUBSCRIPTION,
    "group": azure_dialect.GROUP,
    "location": azure_dialect.LOCATION,
    "image": "Canonical:ubuntu-24_04-lts:server:latest",
    "ssh-key": "ssh-ed25519 AAAA operator",
    "subnet": "net/main",
}


def _azure(server, dialect, tmp_path, monkeypatch):
    arm.tokens.cache_clear()
    monkeypatch.delenv("AZURE_FEDERATED_TOKEN_FILE", raising=False)
    for name, value in azure_environment(server.server_address[1]).items():
        monkeypatch.setenv(name, value)

    def spoil():
        monkeypatch.setenv("AZURE_CLIENT_SECRET", "wrong")
        arm.tokens.cache_clear()

    def drop():
        monkeypatch.delenv("AZURE_CLIENT_SECRET")
        arm.tokens.cache_clear()

    def revoke(right):
        dialect.actions = [name for name in azure_rights.NEEDED if name != right]

    return CloudRig(
        "azure",
        AzureProvider(head=head()),
        dialect,
        server,
        settings=AZURE_SETTINGS,
        template="NC4as_T4_v3",
        zones=("1", "2"),
        offers=("1 Standard_NC4as_T4_v3 on-demand", "2 Standard_NC4as_T4_v3 on-demand"),
        codes=("AllocationFailed", "OperationNotAllowed"),
        right="Microsoft.Compute/virtualMachines/delete",
        revoke=revoke,
        spoil_credentials=spoil,
        drop_credentials=drop,
    )


RIGS = {"google": _google, "azure": _azure}


@contextmanager
def open_rig(name, tmp_path, monkeypatch):
    dialect = make_dialect(name, ScriptedFaults())
    server = serve(dialect)
    try:
        yield RIGS[name](server, dialect, tmp_path, monkeypatch)
    finally:
        server.shutdown()
        server.server_close()
