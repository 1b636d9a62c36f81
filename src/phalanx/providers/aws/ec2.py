"""Calls of EC2 by botocore, each once, and what its errors mean.

botocore is imported with the first pool that asks for it. Credentials come from the environment and the AWS files of the head's account; the
metadata service and the container's are asked only if the pool says so.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.ports.provider import CallUnanswered, OfferRefused
from phalanx.providers.aws.pool_terms import AccountTerms

CONNECT_S: Final = 5.0
READ_S: Final = 30.0
NO_CAPACITY: Final = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientCapacity",
        "UnfulfillableCapacity",
        "ReservationCapacityExceeded",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
        "VcpuLimitExceeded",
        "InstanceLimitExceeded",
        "Unsupported",
    }
)
BAD_KEYS: Final = frozenset(
    {
        "AuthFailure",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "RequestExpired",
        "UnrecognizedClientException",
    }
)
NO_RIGHT: Final = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
UNKNOWN_OUTCOME: Final = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "RequestTimeout",
        "RequestTimeoutException",
        "InternalError",
        "InternalFailure",
        "ServiceUnavailable",
        "Unavailable",
        "EC2ThrottledException",
        "InsufficientAddressCapacity",
        "PendingVerification",
    }
)
_OPENING: Final = threading.Lock()
_METADATA_SOURCES: Final = ("container-role", "iam-role")
_ENCODED: Final = re.compile(r"\s*Encoded authorization failure message:.*", re.DOTALL)


def open_client(account: AccountTerms) -> Any:
    """Return a client that makes each call once. Thread-safe: the first call alone reads the model of EC2, which takes a second.

    Raises:
        BadRequest: botocore is not installed, or there are no credentials or no such profile.
    """
    with _OPENING:
        return _open_client(account)


@lru_cache(maxsize=16)
def _open_client(account: AccountTerms) -> Any:
    try:
        import botocore.config
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        raise BadRequest("the provider aws needs botocore", hint="pip install botocore") from error
    session = botocore.session.Session(profile=account.profile or None)
    try:
        sources = session.get_component("credential_provider")
        if not account.from_instance:
            for name in _METADATA_SOURCES:
                sources.remove(name)
        if session.get_credentials() is None:
            raise BadRequest(
                "no AWS credentials: the environment and the AWS files of the head's account have none",
                hint="set AWS_ACCESS_KEY_ID where the head starts, or use a profile",
            )
        settings = botocore.config.Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": 1},
            user_agent_extra="phalanx",
        )
        return session.create_client(
            "ec2", region_name=account.region, endpoint_url=account.endpoint or None, config=settings
        )
    except botocore.exceptions.BotoCoreError as error:
        raise BadRequest(f"AWS cannot be used: {_one_line(str(error))}") from error


def call(account: AccountTerms, operation: str, **arguments: Any) -> dict[str, Any]:
    """Call EC2 once, and return the answer.

    Raises:
        OfferRefused: no capacity or quota.
        CallUnanswered: no answer, or one that asks to come again.
        Ec2Error: any other error; nothing was done.
        BadRequest: as for `open_client`, or EC2 does not accept the credentials.
    """
    client = open_client(account)
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer: dict[str, Any] = getattr(client, operation)(**arguments)
    except ClientError as error:
        raise _of_answer(error.response) from error
    except BotoCoreError as error:
        raise CallUnanswered(_one_line(str(error))) from error
    return answer


class Ec2Error(OSError):
    """EC2 refused a call. `code`: of EC2, such as `UnauthorizedOperation`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def _of_answer(response: Mapping[str, Any]) -> OSError | BadRequest:
    code = str(response.get("Error", {}).get("Code", ""))
    message = _one_line(_ENCODED.sub("", str(response.get("Error", {}).get("Message", ""))))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in NO_CAPACITY:
        return OfferRefused(f"{code}: {message}")
    if code in BAD_KEYS:
        return BadRequest(
            f"AWS does not accept the credentials: {code}: {message}", hint="set other keys where the head starts"
        )
    if code in UNKNOWN_OUTCOME or status >= 500:
        return CallUnanswered(f"{code}: {message}")
    return Ec2Error(code, message)


def pages(account: AccountTerms, operation: str, key: str, **arguments: Any) -> Sequence[dict[str, Any]]:
    """Return all items of a list, of all its pages. Raises as `call` does."""
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        answer = call(account, operation, **arguments, **({"NextToken": token} if token else {}))
        found += answer.get(key, [])
        token = answer.get("NextToken") or ""
        if not token:
            return found


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
