"""Finds the route of a request, checks access, parses parameters, and answers errors.

A handler's signature declares its parameters: those in braces come from the path, the others from
the query. `request` is the request itself.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from gpulease.errors import BadValue, GpuleaseError, NoSuchRoute
from gpulease.server.auth import Access, caller_in
from gpulease.server.context import Request, RequestContext
from gpulease.server.messages import PLAIN_TEXT, Receive, Response, Scope, Send, json_response
from gpulease.wire.requests import ErrorBody, ErrorReply

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MOST_DETAIL = 200
"""Characters of a parser's message that are shown."""


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table."""

    method: str
    path: str
    access: Access
    verb: str
    """What a caller without access cannot do; the job follows where the path has one."""
    handler: Callable[..., Any]
    reply: type | str | None
    """The shape of the answer, or the media type of a stream; None: no content."""
    body: type | None = None
    status: int = 200
    followed: str | None = None
    """The media type of the answer to a request with follow=true, if that is a stream."""
    plain_errors: bool = False
    """Errors are text for people, and not JSON."""


class Endpoint:
    """A route, ready to serve."""

    def __init__(self, route: Route, prefix: str) -> None:
        self.route = route
        self.path = prefix + route.path
        self.parts = self.path.split("/")
        declared = inspect.signature(route.handler, eval_str=True).parameters
        self.takes_request = "request" in declared
        self.parameters = msgspec.defstruct(
            "Parameters",
            [
                (name, each.annotation)
                if each.default is inspect.Parameter.empty
                else (name, each.annotation, each.default)
                for name, each in declared.items()
                if name != "request"
            ],
            kw_only=True,
        )

    def matches(self, parts: Sequence[str]) -> bool:
        """Tell whether the route serves a path of as many parts."""
        pairs = zip(self.parts, parts, strict=True)
        return all(own == given or (own[:1] == "{" and given) for own, given in pairs)

    def path_values(self, parts: Sequence[str]) -> dict[str, str]:
        """Return the parts of a path that stand for parameters."""
        pairs = zip(self.parts, parts, strict=True)
        return {own[1:-1]: given for own, given in pairs if own[:1] == "{"}


class Router:
    """The application that serves a table of routes."""

    def __init__(self, endpoints: Sequence[Endpoint], context: RequestContext) -> None:
        self.endpoints = endpoints
        self._context = context
        self._by_length: dict[int, list[Endpoint]] = defaultdict(list)
        for endpoint in endpoints:
            self._by_length[len(endpoint.parts)].append(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an error within a stream closes the connection."""
        await (await self._answer(scope))(receive, send)

    async def _answer(self, scope: Scope) -> Response:
        try:
            return await self._handle(scope)
        except GpuleaseError as error:
            return error_response(error)
        except Exception:  # noqa: BLE001  the caller gets an answer, and the log the traceback
            _log.exception("cannot answer %s %s", scope["method"], scope["path"])
            body = ErrorBody(
                GpuleaseError.code,
                "cannot answer: internal error in gpuleased",
                "an admin finds the details in the log: journalctl -u gpuleased",
            )
            return json_response(ErrorReply(body), 500)

    async def _handle(self, scope: Scope) -> Response:
        parts = scope["path"].split("/")
        alike = [each for each in self._by_length.get(len(parts), ()) if each.matches(parts)]
        endpoint = next((each for each in alike if each.route.method == scope["method"]), None)
        if endpoint is None:
            status, why = (405, "Method Not Allowed") if alike else (404, "Not Found")
            body = ErrorBody(NoSuchRoute.code, f"cannot serve this request: {why}")
            return json_response(ErrorReply(body), status)
        try:
            return await self._serve(endpoint, scope, parts)
        except GpuleaseError as error:
            if endpoint.route.plain_errors:
                text = error.text() + "\n"
                return Response(text.encode(errors="replace"), error.http_status, PLAIN_TEXT)
            raise

    async def _serve(self, endpoint: Endpoint, scope: Scope, parts: Sequence[str]) -> Response:
        route, values = endpoint.route, endpoint.path_values(parts)
        # Before the query is read: without access, a caller is told no more than that.
        job = None
        if route.access.concerns_job:
            job = self._context.existing_job(_parsed(values["job_id"], int))
        self._context.rights.check(route.access, caller_in(scope), route.verb, job)
        if query := scope["query_string"]:
            values = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) | values
        given = msgspec.structs.asdict(_parsed(values, endpoint.parameters))
        if endpoint.takes_request:
            given["request"] = Request(scope)
        answer: Response = await route.handler(**given)
        return answer


def _parsed(given: object, kind: type[T]) -> T:
    """Return parameters, which arrive as text.

    Raises:
        BadValue: they cannot be parsed.
    """
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        # Such as: Expected `int` <= 1000 - at `$.limit`
        expected, _, field = str(error).replace("`", "").partition(" - at $.")
        value = given.get(field, "") if isinstance(given, dict) else ""
        reason = f"e{expected[1:_MOST_DETAIL]}"
        raise BadValue.of_field(field or "the query", str(value)[:40], reason) from error


def error_response(error: GpuleaseError) -> Response:
    """Return the answer for an error."""
    body = ErrorBody(error.code, error.message, error.hint, *(error.parts or ()))
    return json_response(ErrorReply(body), error.http_status)
