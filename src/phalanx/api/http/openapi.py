"""The OpenAPI description: paths and parameters come from FastAPI, bodies from msgspec. Each operation names its action."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from phalanx.api.http.routing import AuthorizedRoute, Body, MediaType
from phalanx.wire.api.errors import ErrorReply
from phalanx.wire.api.jobs import IDEMPOTENCY_HEADER
from phalanx.wire.api.output import EndEvent, LogChunk, StateEvent

ACTION_KEY: Final = "x-phalanx-action"
_FOR_BROWSERS: Final = (MediaType.HTML, MediaType.ASSET)
_REF: Final = "#/components/schemas/{name}"
_REFUSALS: Final = {
    "400": "The request is invalid.",
    "401": "The token is missing or not valid.",
    "403": "The caller may not do this, or not to this object.",
    "404": "The object does not exist.",
    "409": "The state of the object does not allow this.",
    "413": "The body is over its limit.",
    "422": "The job file is invalid, or the job can never fit.",
    "503": "Nothing was changed; try again.",
}
_EVENTS: Final = (LogChunk, StateEvent, EndEvent)


def openapi_document(app: FastAPI, version: str) -> dict[str, Any]:
    """Return the OpenAPI document of the app; it is built once."""
    if app.openapi_schema is None:
        routes = [
            route
            for route in app.router.routes
            if isinstance(route, AuthorizedRoute) and route.declared.reply not in _FOR_BROWSERS
        ]
        document = get_openapi(title="Phalanx", version=version, description=__doc__, routes=routes)
        schemas = _schemas(routes)
        for route in routes:
            for method in route.methods or ():
                _describe(document["paths"][route.path_format][method.lower()], route, schemas)
        found = document.get("components", {}).get("schemas", {})
        enumerations = {name: schema for name, schema in found.items() if "enum" in schema}  # of query parameters
        document["components"] = {
            "schemas": enumerations | schemas.components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        }
        app.openapi_schema = document
    return app.openapi_schema


class _Schemas:
    """The schemas of all bodies, built together so that they share components."""

    def __init__(self, kinds: Iterable[type[Any]]) -> None:
        unique = list(dict.fromkeys(kinds))
        schemas, components = msgspec.json.schema_components(unique, ref_template=_REF)
        self.components: dict[str, Any] = dict(components)
        self._of = dict(zip(unique, schemas, strict=True))

    def content(self, body: Body) -> dict[str, Any]:
        """Return the `content` of a body."""
        if isinstance(body, MediaType):
            schema: dict[str, Any] = {"type": "object"} if body is MediaType.ANY_JSON else {"type": "string"}
            if body in (MediaType.BYTES, MediaType.TAR, MediaType.PACKED):
                schema["format"] = "binary"
            if body is MediaType.EVENTS:
                schema["x-event-data"] = [self._of[kind] for kind in _EVENTS]
            return {body.value: {"schema": schema}}
        return {"application/json": {"schema": self._of[body]}}


def _schemas(routes: list[AuthorizedRoute]) -> _Schemas:
    bodies = [
        kind for route in routes for kind in (route.declared.body, route.declared.reply, *route.declared.other_replies)
    ]
    return _Schemas([ErrorReply, *_EVENTS, *(kind for kind in bodies if not isinstance(kind, MediaType))])


def _describe(operation: dict[str, Any], route: AuthorizedRoute, schemas: _Schemas) -> None:
    """Add bodies, responses and security to an operation, in place."""
    declared = route.declared
    operation[ACTION_KEY] = declared.action.value
    operation["security"] = [] if declared.open_to_all else [{"token": []}]
    if declared.body is not MediaType.NOTHING:
        operation["requestBody"] = {"content": schemas.content(declared.body)}
    reply: dict[str, Any] = {"description": "Done."}
    shown = {
        kind: schemas.content(kind)
        for kind in (declared.reply, *declared.other_replies)
        if kind is not MediaType.NOTHING
    }
    if shown:
        reply["content"] = {name: content for part in shown.values() for name, content in part.items()}
    refused = {"application/json": {"schema": {"$ref": _REF.format(name="ErrorReply")}}}
    operation["responses"] = {
        str(declared.status): reply,
        **{status: {"description": text, "content": refused} for status, text in _REFUSALS.items()},
        "default": {"description": "An internal error of the head.", "content": refused},
    }
    if route.endpoint.__name__ == "submit_job":
        operation.setdefault("parameters", []).append(
            {
                "name": IDEMPOTENCY_HEADER,
                "in": "header",
                "required": False,
                "schema": {"type": "string", "maxLength": 200},
            }
        )
