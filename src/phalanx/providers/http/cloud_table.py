"""Tables of clouds: where a cloud is called, with which bodies, and where its answers have ids, names, states and errors.

A table is a TOML file of this package, or one in the folder `providers` of the head's state folder, which only the head's account may be able to
change: it decides where the key is sent. `docs/small-clouds.md` has the format.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.providers.clouds.own_files import check_own_file
from phalanx.providers.clouds.rest_calls import check_url

NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
_FIELD: Final = re.compile(r"\{([a-z-]+)(:number)?\}")
_AUTHS: Final = frozenset({"bearer", "basic", "crusoe"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTemplate:
    """One call. `body`: with fields in braces; None for none."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTemplate:
    """How machines are listed: paths in the answer, and below an item. `ended`: states in which a machine is not charged any more."""

    path: str
    items: str
    id: str
    name: str
    status: str = ""
    created: str = ""
    next_page: str = ""
    page_query: str = ""
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTemplate:
    """How the operation that a start begins is followed: paths in its answer, and the states that end it."""

    path: str
    id: str
    state: str
    done: str
    failed: str
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTemplate:
    """What errors mean. `no_capacity`: codes; `no_capacity_words`: parts of messages, in lower case; `again`: codes that ask to come again."""

    code: str = ""
    message: str = ""
    no_capacity: tuple[str, ...] = ()
    no_capacity_words: tuple[str, ...] = ()
    again: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudTable:
    """One cloud.

    Attributes:
        auth: how calls are signed: `bearer`, `basic` or `crusoe`.
        keys: variables with the key, in the environment of the head's account.
        settings: that a pool must have.
        zone: a regular expression.
        settle_s: so long after a call without an answer, the list has a machine that it made.
        power_off: a command by which a machine ends itself; empty for `shutdown`.
        machine: path of the id in the answer to a start.
        types: path of the list of types, and of their names in it; empty if the cloud has no such list.
    """

    name: str
    url: str
    auth: str
    keys: tuple[str, ...]
    settings: tuple[str, ...]
    zone: str
    example: str
    settle_s: float
    power_off: str
    machine: str
    types: tuple[str, str]
    start: CallTemplate
    stop: CallTemplate
    listing: ListTemplate
    operation: OperationTemplate | None = None
    errors: ErrorTemplate = field(default_factory=ErrorTemplate)


def read_table(name: str, folder: str) -> CloudTable:
    """Return the table of a cloud: that in the folder, else that of this package.

    Raises:
        BadRequest: it does not exist, others may change it, or it is invalid.
    """
    if not NAME.fullmatch(name):
        raise BadRequest(f"the setting cloud is {name[:40]!r}, not the name of a cloud", hint=_known())
    path = os.path.join(folder, f"{name}.toml")
    if os.path.exists(path):
        check_own_file(path)
        with open(path, encoding="utf-8") as file:
            text = file.read()
    else:
        found = importlib.resources.files(__package__) / "tables" / f"{name}.toml"
        if not found.is_file():
            raise BadRequest(f"there is no table of cloud {name}", hint=_known())
        text, path = found.read_text(encoding="utf-8"), f"the table of {name}"
    try:
        return parse_table(name, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRequest(f"{path} is not a table of a cloud: {error!r}") from error


def parse_table(name: str, words: Mapping[str, Any]) -> CloudTable:
    """Return the table in these words.

    Raises:
        BadRequest: the URL is not https, or the way to sign is unknown.
        KeyError, TypeError: a word is missing or of another type.
    """
    if words["auth"] not in _AUTHS:
        raise BadRequest(f"cloud {name}: auth {words['auth']!r} is not one of {', '.join(sorted(_AUTHS))}")
    start, stop, types = words["start"], words["stop"], words.get("types", {})
    listing = {**words["list"], "ended": tuple(words["list"].get("ended", ()))}
    errors: dict[str, Any] = {
        key: tuple(each) if isinstance(each, list) else each for key, each in words.get("errors", {}).items()
    }
    return CloudTable(
        name=name,
        url=check_url(words["url"]),
        auth=words["auth"],
        keys=tuple(words["keys"]),
        settings=tuple(words.get("settings", ())),
        zone=words.get("zone", ".*"),
        example=words.get("example", ""),
        settle_s=float(words.get("settle_s", 60)),
        power_off=str(words.get("power_off", "")).strip(),
        machine=start["machine"],
        types=(types.get("path", ""), types.get("names", "")),
        start=CallTemplate(method=start.get("method", "POST"), path=start["path"], body=start.get("body")),
        stop=CallTemplate(method=stop.get("method", "DELETE"), path=stop["path"], body=stop.get("body")),
        listing=ListTemplate(**listing),
        operation=OperationTemplate(**start["operation"]) if "operation" in start else None,
        errors=ErrorTemplate(**errors),
    )


def fill(template: Any, values: Mapping[str, str]) -> Any:
    """Return a template of a body or path with its fields replaced. `{x:number}` alone becomes a number, `{quoted-x}` is quoted for a shell.

    Raises:
        KeyError: a field has no value.
    """
    if isinstance(template, Mapping):
        return {key: fill(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [fill(value, values) for value in template]
    if not isinstance(template, str):
        return template
    whole = _FIELD.fullmatch(template)
    if whole is not None and whole[2]:
        return int(values[whole[1]])
    return _FIELD.sub(lambda match: _value(match[1], values), template)


def look_up(body: Any, path: str) -> Any:
    """Return what an answer has at a path such as `data.ids.0`; None if it has nothing there."""
    return next(iter(_each(body, path.split(".") if path else [])), None)


def look_up_all(body: Any, path: str) -> Sequence[Any]:
    """Return all that an answer has at a path, in which `*` stands for every item, and `*key` for every key."""
    return list(_each(body, path.split(".")))


def _each(body: Any, parts: Sequence[str]) -> Iterator[Any]:
    if not parts:
        yield body
        return
    first, rest = parts[0], parts[1:]
    if first == "*key" and isinstance(body, Mapping):
        for key in body:
            yield from _each(key, rest)
    elif first == "*" and isinstance(body, Mapping | list):
        for value in body.values() if isinstance(body, Mapping) else body:
            yield from _each(value, rest)
    elif isinstance(body, Mapping) and first in body:
        yield from _each(body[first], rest)
    elif isinstance(body, list) and first.isdecimal() and int(first) < len(body):
        yield from _each(body[int(first)], rest)


def _value(name: str, values: Mapping[str, str]) -> str:
    if name.startswith("quoted-"):
        return shlex.quote(values[name.removeprefix("quoted-")])
    return values[name]


def _known() -> str:
    folder = importlib.resources.files(__package__) / "tables"
    names = sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))
    return f"clouds: {', '.join(names)}; or a table of your own in the folder providers of the head"
