"""Records of secrets. A value goes to the head only; no record for people has one."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import UserId


class SecretView(msgspec.Struct, frozen=True, kw_only=True):
    """A secret without its value. `scope`: "project" or "user", and `owner` its name; `version`: how often it was set, by whom and when last."""

    name: str
    scope: str
    owner: str
    version: int
    by: UserId
    at_s: float


class SecretList(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets that the caller's jobs may use, and those of projects that the caller administers."""

    secrets: list[SecretView]
    next: str = ""


class SecretBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of a secret: text of at least 8 characters and at most 32 KiB."""

    value: str


class SecretReply(msgspec.Struct, frozen=True, kw_only=True):
    """The secret as it is now."""

    secret: SecretView


class SecretRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """A secret was removed. `jobs`: how many jobs that have not ended use it."""

    jobs: int


class SecretsRotated(msgspec.Struct, frozen=True, kw_only=True):
    """All secrets are encrypted with the newest key. `unreadable`: those that no key of the head decrypts; set them again."""

    count: int
    key: str
    unreadable: list[str] = []
