"""Secrets: values that jobs get in their environment and that nothing stores in clear. The record holds the encrypted value only."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import ProjectId, UserId

VALUE_CHARS_MIN: Final = 8
"""A shorter value occurs in ordinary output, so it could not be masked there. The same bound as Bitbucket and GitLab have for masked variables."""
VALUE_BYTES_MAX: Final = 32 * 1024  # a quarter of what Linux allows for one variable (MAX_ARG_STRLEN)
SECRETS_MAX: Final = 64  # of one job
SECRETS_VARIABLE: Final = "PHALANX_SECRETS"
"""Variable of a task with the names of its secrets."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Words as whole parts of a name, so that TOKENIZERS_PARALLELISM and MAX_TOKENS are not meant; a name of a file holds no secret itself.
_LOOKS_SECRET: Final = re.compile(
    r".*(?:TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|(?:^|_|API)KEY)(?:_(?!FILE|PATH|DIR).*)?", re.IGNORECASE
)
_RESERVED: Final = "PHALANX_"


class SecretScope(enum.StrEnum):
    """Whose jobs may use a secret."""

    PROJECT = "project"  # all jobs of the project
    USER = "user"  # the jobs of one user, in any project


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """One secret. `key`: id of the key that encrypts `sealed`; `version`: how often it was set; `by` and `at_s`: who set it last, and when."""

    id: str
    scope: SecretScope
    owner: str
    name: str
    sealed: str = field(repr=False)
    key: str
    version: int
    by: UserId
    at_s: float


def secret_id(scope: SecretScope, owner: str, name: str) -> str:
    """Return the id of a secret. It is also the associated data of its encryption: no value can be moved to another name or owner."""
    return f"{scope}:{name}:{owner}"


def check_secret_name(name: str) -> str:
    """Return the name of a secret, which is that of the job's variable.

    Raises:
        BadRequest: it is not a valid name of a variable, or Phalanx sets that variable.
    """
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name[:60]!r} is not a name of a secret",
            hint="it becomes a variable: letters, digits and _, not beginning with a digit, such as HF_TOKEN",
        )
    if name.startswith(_RESERVED):
        raise BadRequest(f"secret {name}: names beginning with {_RESERVED} belong to Phalanx", hint="use another name")
    return name


def check_secret_value(name: str, value: str) -> None:
    """Check that a value can be a variable and can be masked in output. No message repeats it.

    Raises:
        BadRequest: it is too short or too long, or contains a NUL byte.
    """
    if len(value.strip()) < VALUE_CHARS_MIN:
        raise BadRequest(
            f"secret {name}: the value has {len(value.strip())} characters; at least {VALUE_CHARS_MIN} are needed",
            hint="a shorter value could not be masked in the output of jobs",
        )
    size = len(value.encode(errors="surrogatepass"))
    if size > VALUE_BYTES_MAX:
        raise BadRequest(f"secret {name}: the value has {size} bytes; at most {VALUE_BYTES_MAX} are allowed")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise BadRequest(f"secret {name}: the value contains a NUL byte or is not text", hint="encode it with base64")


def parse_secret_names(value: object) -> tuple[str, ...]:
    """Parse the names that a job lists: a list, or a text with commas. Each is kept once, in order.

    Raises:
        BadRequest: one is not a name.
    """
    listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else None
    if listed is None or not all(isinstance(one, str) for one in listed):
        raise BadRequest("secrets: not a list of names", hint="write secrets: [HF_TOKEN]")
    names = tuple(dict.fromkeys(check_secret_name(one.strip()) for one in listed if one.strip()))
    if len(names) > SECRETS_MAX:
        raise BadRequest(f"secrets: {len(names)} names; at most {SECRETS_MAX} are allowed")
    return names


def find_secret(secrets: Mapping[str, Secret], name: str, *, user: UserId, project: ProjectId) -> Secret | None:
    """Return the secret that a job of this user and project gets under a name: the user's own before the project's."""
    own = secrets.get(secret_id(SecretScope.USER, user, name))
    return own if own is not None else secrets.get(secret_id(SecretScope.PROJECT, project, name))


def variables_like_secrets(env: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of variables that look like secrets."""
    return [name for name, value in env if value and _LOOKS_SECRET.fullmatch(name)]
