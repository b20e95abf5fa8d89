"""The OpenAPI document of the API, made from the table of routes."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from gpulease import __version__
from gpulease.server.messages import JSON, PLAIN_TEXT
from gpulease.server.router import Endpoint, Route
from gpulease.wire.requests import (
    CancelRequest,
    DrainRequest,
    ErrorReply,
    KeepRequest,
    PauseRequest,
)

_OPTIONAL_BODIES = (CancelRequest, KeepRequest, DrainRequest, PauseRequest)
_REFERENCE = "#/components/schemas/{name}"


def api_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document, to be encoded as JSON."""
    kinds = {each.route.body for each in endpoints} | {each.route.reply for each in endpoints}
    wire = [kind for kind in kinds if isinstance(kind, type)]
    _, schemas = msgspec.json.schema_components([*wire, ErrorReply], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.route.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpulease", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    route = endpoint.route
    error = _json(ErrorReply)
    if route.plain_errors:
        error = {PLAIN_TEXT: {"schema": {"type": "string"}}, **error}
    made: dict[str, Any] = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "operationId": route.handler.__name__ + endpoint.path.replace("/", "_"),
        "parameters": _parameters(endpoint),
        "responses": {
            str(route.status): _reply(route),
            "default": {"description": "An error", "content": error},
        },
    }
    if route.body is not None:
        made["requestBody"] = {
            "required": route.body not in _OPTIONAL_BODIES,
            "content": _json(route.body),
        }
    return made


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    in_path = endpoint.path_values(endpoint.parts)
    return [
        {
            "name": field.name,
            "in": "path" if field.name in in_path else "query",
            "required": field.required,
            "schema": msgspec.json.schema(field.type),
        }
        for field in msgspec.structs.fields(endpoint.parameters)
    ]


def _reply(route: Route) -> dict[str, Any]:
    described: dict[str, Any] = {"description": HTTPStatus(route.status).phrase}
    streams = [each for each in (route.followed, route.reply) if isinstance(each, str)]
    content: dict[str, Any] = {each: {"schema": {"type": "string"}} for each in streams}
    if isinstance(route.reply, type):
        content |= _json(route.reply)
    return {**described, "content": content} if content else described


def _json(kind: type) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}
