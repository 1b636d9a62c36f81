"""Requests drawn from the description of the API by schemathesis: some that fit it, some that do not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET

from tests.hostile.asked import Asked
from tests.hostile.operations import Operation

KNOWN_NAMES = 0.6  # of the requests name things that exist


def drawn(
    description: Mapping[str, Any], known: list[Operation], names: dict[str, str], each: int, rng: random.Random
) -> Iterator[Asked]:
    """About `each` requests for every known operation, half of them fitting the description."""
    schema = schemathesis.openapi.from_dict(_without_security(description))
    by_id = {operation.id: operation for operation in known}
    # As read before any example is drawn: schemathesis caches what it reads of a schema, so a second reading costs nothing.
    for found in schema.get_all_operations():
        told: Any = found.ok()  # type: ignore[union-attr]  # an operation that cannot be read raises here, and should
        operation = by_id.get(told.definition.raw["operationId"])
        if operation is None:
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            for pinned in (True, False) if "{" in operation.path else (False,):
                if mode is GenerationMode.NEGATIVE and not _may_differ(told.definition.raw, pinned=pinned):
                    continue
                count = each / 2 * (1 if "{" not in operation.path else KNOWN_NAMES if pinned else 1 - KNOWN_NAMES)
                here = {name: value for name, value in names.items() if "{" + name + "}" in operation.path}
                for case in _cases(told, mode, here if pinned else None, max(1, round(count)), rng.randrange(2**32)):
                    yield _asked(operation, case, mode.value, rng)


def _may_differ(told: Mapping[str, Any], *, pinned: bool) -> bool:
    """Whether there is anything that could contradict the description; a search for it would be long and in vain."""
    places = {parameter["in"] for parameter in told.get("parameters", ())} - ({"path"} if pinned else set())
    return bool(places) or "requestBody" in told


def _without_security(description: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens are ours to choose; made up ones would end every request at the gate."""
    plain: dict[str, Any] = json.loads(json.dumps(description))
    plain["components"].pop("securitySchemes", None)
    for methods in plain["paths"].values():
        for operation in methods.values():
            operation.pop("security", None)
    return plain


def _cases(operation: Any, mode: GenerationMode, names: dict[str, str] | None, count: int, number: int) -> list[Any]:
    cases: list[Any] = []
    strategy = operation.as_strategy(generation_mode=mode, **({} if names is None else {"path_parameters": names}))

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(case: Any) -> None:
        cases.append(case)

    try:
        draw()
    except Unsatisfiable:  # an operation without a parameter has nothing that could not fit
        return []
    return cases


def _asked(operation: Operation, case: Any, mode: str, rng: random.Random) -> Asked:
    query = {str(name): value for name, value in (case.query or {}).items()}
    # `formatted_path` is quoted by schemathesis; what it leaves, as a blank, would be another request line.
    target = quote(case.formatted_path, safe="%/~!$&'()*+,;=:@-._")
    if query:
        target += "?" + urlencode(
            {name: _words(value) for name, value in query.items()}, doseq=True, errors="surrogatepass"
        )
    headers = tuple(
        (name, str(value).replace("\r", "").replace("\n", ""))
        for name, value in (case.headers or {}).items()
        if name
        and name.isascii()
        and name.replace("-", "").isalnum()
        and name.lower() not in ("host", "authorization", "content-length", "transfer-encoding", "connection")
    )
    return Asked(
        source=f"drawn, {mode}",
        operation=operation.id,
        method=case.method,
        target=target,
        headers=headers,
        body=_bytes(case.body),
        role=operation.role(rng),
        waits=operation.waits(query),
        odd=mode,
    )


def _words(value: Any) -> Any:
    if isinstance(value, list):
        return [_words(each) for each in value]
    return value if isinstance(value, str | bytes) else json.dumps(value)


def _bytes(body: Any) -> bytes:
    if body is NOT_SET or body is None:
        return b"" if body is NOT_SET else b"null"
    if isinstance(body, bytes):
        return body
    data = getattr(body, "data", None)
    if isinstance(data, bytes):  # schemathesis's Binary
        return data
    return json.dumps(body, default=str).encode()
