"""How a job's variables name an object store: the endpoint and the credentials of gs:// and az://, for obstore and for rclone alike.

Variables of the clouds' own libraries and command lines count beside those of obstore, which reads its own by itself:
https://docs.rs/object_store (GoogleConfigKey, AzureConfigKey);
STORAGE_EMULATOR_HOST of Google's client libraries, which then send no credentials (googleapis/python-storage, client.py);
AZURE_STORAGE_ACCOUNT, _KEY, _SAS_TOKEN, _SERVICE_ENDPOINT and _CONNECTION_STRING of `az storage`
(https://learn.microsoft.com/azure/storage/blobs/authorize-data-operations-cli), and the well-known account of Azurite
(https://learn.microsoft.com/azure/storage/common/storage-use-azurite).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_YES: Final = frozenset({"1", "true", "yes", "on"})
_EMULATOR_ACCOUNT: Final = "devstoreaccount1"
# Public: every copy of the emulator has it.
_EMULATOR_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_EMULATOR_URL: Final = "http://127.0.0.1:10000"

_FIRST: Final = {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_ACCOUNT_KEY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleAccess:
    """What a job gives for gs://. Empty: the default of Google's libraries.

    Attributes:
        endpoint: of a server that is not Google's, without a path.
        anonymous: no credentials are sent.
        key_file: of a service account.
        key_text: the content of such a file.
        token: an access token.
    """

    endpoint: str = ""
    anonymous: bool = False
    key_file: str = ""
    key_text: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureAccess:
    """What a job gives for az://. Empty: the default of Azure's libraries.

    Attributes:
        account: its name.
        key: of the account.
        sas: a shared access signature, without a question mark.
        endpoint: of the account's blobs, if it is not Azure's own.
    """

    account: str = ""
    key: str = ""
    sas: str = ""
    endpoint: str = ""


def google_access(variables: Mapping[str, str]) -> GoogleAccess:
    """Read a job's variables. An emulator gets no credentials, as from Google's own libraries."""
    emulator = variables.get("STORAGE_EMULATOR_HOST", "")
    endpoint = (emulator or variables.get("GOOGLE_BASE_URL", "")).rstrip("/")
    if emulator and "://" not in emulator:
        endpoint = f"http://{endpoint}"
    if emulator or is_set(variables, "GOOGLE_SKIP_SIGNATURE"):
        return GoogleAccess(endpoint=endpoint, anonymous=True)
    return GoogleAccess(
        endpoint=endpoint,
        key_file=first_set(variables, "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
        key_text=variables.get("GOOGLE_SERVICE_ACCOUNT_KEY", ""),
        token=variables.get("GOOGLE_BEARER_TOKEN", ""),
    )


def azure_access(variables: Mapping[str, str]) -> AzureAccess:
    """Read a job's variables; single ones win over parts of the connection string."""
    parts = _connection(variables.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    emulator = is_set(variables, "AZURE_STORAGE_USE_EMULATOR") or parts.get("usedevelopmentstorage", "") in _YES
    account = first_set(variables, "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT") or parts.get(
        "accountname", ""
    )
    key = first_set(variables, "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY")
    sas = first_set(variables, "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
    endpoint = first_set(
        variables, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT"
    ) or parts.get("blobendpoint", "")
    if emulator:
        account = account or _EMULATOR_ACCOUNT
        base = variables.get("AZURITE_BLOB_STORAGE_URL", "") or _EMULATOR_URL
        endpoint = endpoint or f"{base.rstrip('/')}/{account}"
        key = key or ("" if sas else _EMULATOR_KEY)
    elif not endpoint and (suffix := parts.get("endpointsuffix", "")):
        endpoint = f"{parts.get('defaultendpointsprotocol', 'https')}://{account}.blob.{suffix}"
    given = bool(key or sas)  # one kind of credentials: a key of the string does not join a signature of a variable
    return AzureAccess(
        account=account,
        key=key if given else parts.get("accountkey", ""),
        sas=(sas if given else parts.get("sharedaccesssignature", "")).lstrip("?"),
        endpoint=endpoint.rstrip("/"),
    )


def obstore_settings(scheme: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Settings of obstore for a scheme, beside those that it reads from the variables by itself."""
    match scheme:
        case "gs":
            return _google_settings(google_access(variables))
        case "az":
            access = azure_access(variables)
            found = {
                "account_name": access.account,
                "account_key": access.key,
                "sas_token": "" if access.key else access.sas,
                "endpoint": access.endpoint,
            }
            return {name: text for name, text in {**found, "use_emulator": "false"}.items() if text}
        case _:
            return {}


def credential_variable(url: str) -> str:
    """The variable that a person would set first for an address."""
    return _FIRST.get(url.partition("://")[0], "AWS_ACCESS_KEY_ID")


def first_set(variables: Mapping[str, str], *names: str) -> str:
    """The first of the variables that has a value; "" if none has."""
    return next((text for name in names if (text := variables.get(name, ""))), "")


def is_set(variables: Mapping[str, str], name: str) -> bool:
    """Whether a variable says yes."""
    return variables.get(name, "").lower() in _YES


def _google_settings(access: GoogleAccess) -> dict[str, str]:
    if not access.endpoint:
        return {}
    if not access.anonymous:
        return {"base_url": access.endpoint}
    # Without this obstore asks for a token before it writes, although `skip_signature` says to sign nothing.
    key = {"gcs_base_url": access.endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
    return {"base_url": access.endpoint, "service_account_key": json.dumps({**key, "private_key_id": ""})}


def _connection(text: str) -> dict[str, str]:
    """The parts of a connection string by their names in small letters; a value may have equal signs."""
    pairs = (one.partition("=") for one in text.split(";") if "=" in one)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
