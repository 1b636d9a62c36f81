"""Clouds for contract tests: a provider of ours, and a server in this process that answers as the cloud's reference says (`benchmarks.clouds`)."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import importlib.resources
import json
import re
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from benchmarks.clouds import azure_dialect, google_dialect, small_dialect
from benchmarks.clouds.cloud_faults import CloudFaults
from benchmarks.clouds.dialect import DialectCall
from benchmarks.clouds.dialect_server import make_dialect, serve
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
from phalanx.providers.http.cloud_table import read_table
from phalanx.providers.http.provider import HttpProvider

OWNER = "0123456789abcdef"
SETTLE_S = 0.05


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
        named: it has no tokens, and lists names only.
        right: one that the provider needs; None if keys of this cloud have none.
        spoil_credentials, drop_credentials: make them wrong, or missing; `revoke`: takes a right.
    """

    def __init__(self, name, provider, dialect, server, **words):
        self.name, self.provider, self.dialect, self.server = name, provider, dialect, server
        self.settings, self.template, self.zones = words["settings"], words["template"], words["zones"]
        self.offers, self.codes = words["offers"], words["codes"]
        self.named = words.get("named", False)
        self.wrong_zone = "mars" if name == "crusoe" else "mars-central9-a"  # its table knows the form of a zone only
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
def private_key_pem() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def write_google_key(path: Path, port: int, client: str = "campaign") -> Path:
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


def google_environment(key: Path, port: int) -> dict[str, str]:
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
        dialect.permissions = {*rights.NEEDED, rights.CONSOLE_PERMISSION} - {right}

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


def azure_environment(port: int) -> dict[str, str]:
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
        dialect.actions = [name for name in (*azure_rights.NEEDED, azure_rights.CONSOLE_ACTION) if name != right]

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


SMALL: dict[str, dict[str, Any]] = {
    "lambda": {
        "settings": {"ssh-key": "k"},
        "template": "gpu_1x_a10",
        "zones": ("us-east-1", "us-west-2"),
        "codes": ("instance-operations/launch/insufficient-capacity", "global/quota-exceeded"),
    },
    "runpod": {
        "settings": {"image": "node:1"},
        "template": "NVIDIA L4:1",
        "zones": ("US-KS-2", "EU-RO-1"),
        "codes": ("no capacity", "out of stock"),
    },
    "crusoe": {
        "settings": {"project": small_dialect.PROJECT, "image": "node", "ssh-key": "ssh-ed25519 AAAA"},
        "template": "l4.1x",
        "zones": ("us-east1-a", "us-northcentral1-a"),
        "codes": ("out_of_stock", "quota_exceeded"),
    },
}


def write_small_table(name: str, folder: Path, port: int, settle_s: float) -> None:
    """Write the table of a cloud as it is shipped, but for a server on this port and a shorter wait."""
    text = (importlib.resources.files("phalanx.providers.http") / "tables" / f"{name}.toml").read_text()
    text = re.sub(r'(?m)^url = "https://[^/"]+', f'url = "http://127.0.0.1:{port}', text)
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / f"{name}.toml").write_text(re.sub(r"(?m)^settle_s = .*", f"settle_s = {settle_s}", text))


def _small(name, server, dialect, tmp_path, monkeypatch):
    write_small_table(name, tmp_path / "providers", server.server_address[1], SETTLE_S)
    keys = read_table(name, str(tmp_path / "providers")).keys
    for key, value in zip(keys, (small_dialect.KEY, small_dialect.SECRET), strict=False):
        monkeypatch.setenv(key, value)
    words = SMALL[name]
    kind = words["template"].replace(" ", "_")
    return CloudRig(
        name,
        HttpProvider(head=head(), folder=str(tmp_path / "providers")),
        dialect,
        server,
        settings={"cloud": name, "virtual": "1", **words["settings"]},
        template=words["template"],
        zones=words["zones"],
        offers=tuple(f"{zone} {kind} on-demand" for zone in words["zones"]),
        codes=words["codes"],
        spoil_credentials=lambda: monkeypatch.setenv(keys[0], "wrong"),
        drop_credentials=lambda: monkeypatch.delenv(keys[0]),
        named=True,
    )


RIGS: dict[str, Any] = {"google": _google, "azure": _azure, **{name: partial(_small, name) for name in SMALL}}


@contextmanager
def open_rig(name, tmp_path, monkeypatch):
    dialect = make_dialect(name, ScriptedFaults())
    server = serve(dialect)
    try:
        yield RIGS[name](server, dialect, tmp_path, monkeypatch)
    finally:
        server.shutdown()
        server.server_close()
