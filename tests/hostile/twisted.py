"""Good requests with one thing twisted: they get further in than random ones."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from tests.hostile.asked import Asked
from tests.hostile.operations import Operation

DEEP = 3_000  # levels: past Python's recursion limit
LONG = 200_000  # characters
LONGEST = 10_000_000  # bytes: over every limit but a blob's
LONGEST_SHARE = 0.003  # each costs what a hundred others do


class Literal(str):
    """Stands in a JSON text as it is, though it is no JSON string."""

    __slots__ = ()


TEXTS = (
    "",
    " ",
    "\x00",
    "a\x00b",
    "\ud800",
    "\udfff\ud800",
    "\U0010ffff",
    "\u202egnp.exe",
    "\ufeff",
    "e\u0301" * 50,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\r\nX-Injected: 1",
    "\x1b[2J\x1b]0;owned\x07",
    "../../../../etc/passwd",
    "/etc/shadow",
    "~root",
    "..",
    ".",
    "a/../b",
    "%2e%2e%2f",
    "%00",
    "%s%s%n",
    "{0.__class__}",
    "${jndi:ldap://x}",
    "$(reboot)",
    "`id`",
    "'; DROP TABLE jobs; --",
    '" OR 1=1',
    "<script>alert(1)</script>",
    "null",
    "NaN",
    "Infinity",
    "-0",
    "1e309",
    "0x10",
    "1_000",
    "\u0661\u0662",
    "\uff11",
    "1.",
    "+1",
    " 1",
    "1 ",
    "9" * 5000,
    "-1",
    "1:2:3:4:5",
    "99999999999999999999h",
    "-5s",
    "1h1h",
    "0s",
    "infs",
    "nans",
    "1e400d",
    "9999-12-31T23:59:59",
    "10000-01-01",
    "0000-00-00",
    "-1-01-01",
    "now+1e308s",
    "1969-12-31T23:59:59Z",
    "2026-02-30",
    "2026-11-21T25:61:61+99:99",
    "gpu[001-999999999]",
    "n[9-1]",
    "n[",
    "n[0-3]]",
    "n[0-3,]",
    "[" * 500,
    "n[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]",
    "1-99999999999",
    "0-5000000:1",
    "1-10%0",
    "0-3%-1",
    "5-1",
    "1,1,1",
    "afterok:1",
    "afterok:" + ",".join(map(str, range(3000))),
    "after:",
    "afterok:-1",
    "afterok:99999999999999999999",
    "8",
    "0x8",
    "99999999999999x99999999999",
    "h100:",
    ":8",
    "h100-80gb:1:2:3",
    "2x",
    "x2",
    "1e3",
    "0",
    "1KiB",
    "-1GiB",
    "1e400GiB",
    "99999999999999999999TiB",
    "tp=2,fsdp=0",
    "tp=-1",
    "auto",
    "auto,auto",
    "tp=" + "9" * 400,
    "s3://",
    "file:///etc/passwd",
    "http://[::1",
    "sha256:" + "0" * 64,
    "a" * 256,
    "a" * 5000,
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    255,
    256,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    -(2**63) - 1,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e15,
    1e17,
    1e300,
    1.7976931348623157e308,
    -1e308,
    253402300799,
    253402300800,
    32503680000.0,
    -62135596801,
    1e18,
)
LITERALS = tuple(
    map(
        Literal,
        (
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            "-1e999",
            "00",
            "01",
            "1.",
            ".5",
            "+1",
            "0x10",
            "True",
            "undefined",
            "'x'",
            "1" * 5000,
            '"\\ud800"',
            '"\\udc00\\ud800"',
            '"\\u0000"',
            '"\\x"',
            '"\x01"',
            "tru",
            "",
        ),
    )
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": {}}},
    [1, "a", None],
    "x",
    1,
)


def twisted(operation: Operation, names: dict[str, str], rng: random.Random) -> Asked:
    """The operation's good request with one to three twists."""
    names, query = dict(names), dict(operation.good.query)
    headers = dict(operation.good.headers) if rng.random() < 0.3 else {}
    body = copy.deepcopy(operation.good.body)
    odd = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = [
            name
            for name, there in (
                ("query", query),
                ("body", body is not None),
                ("path", "{" in operation.path),
                ("headers", True),
            )
            if there
        ]
        place = rng.choices(places, [{"body": 8, "query": 4, "path": 1.5, "headers": 0.7}[name] for name in places])[0]
        odd.append(place)
        if place == "query":
            _twist_query(query, rng)
        elif place == "path":
            names[rng.choice([name for name in names if "{" + name + "}" in operation.path])] = rng.choice(TEXTS)
        elif place == "headers":
            headers[
                rng.choice(
                    ("Idempotency-Key", "Last-Event-ID", "Accept", "Content-Type", "Range", "If-None-Match", "Cookie")
                )
            ] = _for_header(rng)
        else:
            body = _twist(body, rng)
    content = body if isinstance(body, bytes) else _json(body) if body is not None else b""
    if content and rng.random() < 0.05:
        content = _spoilt(content, rng)
    return Asked(
        source="twisted",
        operation=operation.id,
        method=operation.method,
        target=operation.target(names, query),
        headers=tuple(headers.items()),
        body=content,
        role=operation.role(rng),
        waits=operation.waits(query),
        odd=",".join(odd),
    )


def untwisted(operation: Operation, names: dict[str, str], role: str) -> Asked:
    """The operation's good request."""
    good = operation.good
    body = good.body if isinstance(good.body, bytes) else _json(good.body) if good.body is not None else b""
    return Asked(
        source="good",
        operation=operation.id,
        method=operation.method,
        target=operation.target(names, good.query),
        headers=tuple(good.headers.items()),
        body=body,
        role=role,
        waits=operation.waits(good.query),
    )


def _twist_query(query: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(list(query))
    match rng.randrange(6):
        case 0:
            del query[name]
        case 1:
            query[name] = [query[name], rng.choice(TEXTS)]  # the same name twice
        case 2:
            query[rng.choice(TEXTS)] = rng.choice(TEXTS)
        case 3:
            query[name] = rng.choice(NUMBERS)
        case _:
            query[name] = rng.choice(TEXTS)


def _twist(value: Any, rng: random.Random) -> Any:
    """One change somewhere inside."""
    if isinstance(value, bytes):
        return rng.choice(
            (b"", b"\x00" * 100, (value * 1000)[:LONG], value[:3], rng.randbytes(50), b'{"version": 1}', b"[" * DEEP)
        )
    if isinstance(value, dict) and value and rng.random() < 0.9:
        changed = dict(value)
        key = rng.choice(list(changed))
        match rng.randrange(12):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(TEXTS)] = changed[key]
            case 2:
                changed[key + "s"] = changed.pop(key)
            case _:
                changed[key] = _twist(changed[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.6:
        place = rng.randrange(len(value))
        if rng.random() < 0.15:
            return (value * rng.choice((2, 1000)))[:20_000]
        return [*value[:place], _twist(value[place], rng), *value[place + 1 :]]
    return _nasty(rng)


def _nasty(rng: random.Random) -> Any:
    match rng.randrange(14):
        case 0 | 1 | 2 | 3:
            return rng.choice(TEXTS)
        case 4 | 5 | 6:
            return rng.choice(NUMBERS)
        case 7 | 8:
            return rng.choice(LITERALS)
        case 9 | 10:
            return rng.choice(OTHERS)
        case 11:
            return [rng.choice(TEXTS) for _ in range(rng.choice((1, 3, 300)))]
        case 12:
            return {rng.choice(TEXTS): rng.choice(TEXTS + NUMBERS) for _ in range(rng.choice((1, 3, 100)))}
        case _:
            if rng.random() < LONGEST_SHARE * 14:
                return "x" * LONGEST
            return rng.choice(
                (
                    "x" * LONG,
                    Literal("[" * DEEP + "]" * DEEP),
                    Literal('{"a":' * DEEP + "1" + "}" * DEEP),
                    "\u00e9" * LONG,
                    list(range(20_000)),
                )
            )


def _for_header(rng: random.Random) -> str:
    text = rng.choice(
        (
            *TEXTS,
            "x" * 300,
            "bytes=0-0,1-1,2-",
            "application/xml",
            "multipart/form-data; boundary=",
            "text/event-stream",
            "application/json; charset=utf-16",
        )
    )
    return text.replace("\r", " ").replace("\n", " ").replace("\x00", "0")[:8000]


def _json(value: Any) -> bytes:
    """JSON with literals as they are, and lone surrogates escaped."""
    literals: list[str] = []

    def shown(inner: Any) -> Any:
        if isinstance(inner, Literal):
            literals.append(str(inner))
            return f"@@{len(literals) - 1}@@"
        if isinstance(inner, dict):
            return {key: shown(each) for key, each in inner.items()}
        if isinstance(inner, list):
            return [shown(each) for each in inner]
        return inner

    text = json.dumps(shown(value), ensure_ascii=not _encodes(value))
    for number, literal in enumerate(literals):
        text = text.replace(f'"@@{number}@@"', literal)
    return text.encode()


def _encodes(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, ValueError):
        return False
    return True


def _spoilt(content: bytes, rng: random.Random) -> bytes:
    """Bytes that are no longer what they were."""
    place = rng.randrange(len(content))
    match rng.randrange(7):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + bytes((content[place] ^ 1 << rng.randrange(8),)) + content[place + 1 :]
        case 2:
            return b"\xef\xbb\xbf" + content
        case 3:
            return content.decode("utf-8", "replace").encode("utf-16")
        case 4:
            return content + content
        case 5:
            return content.replace(b"{", b'{"run": "a", "run": "b", ', 1)
        case _:
            return content[:place] + rng.randbytes(4) + content[place:]
