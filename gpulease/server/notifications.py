"""The route that sends a test message to the receivers of the caller."""

from gpulease.domain.notifications import test_message
from gpulease.server.context import RequestContext, caller_of_request, json_response
from gpulease.server.messages import Request, Response


class NotificationHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    async def test(self, request: Request) -> Response:
        """Send a message as the caller, and show what happened at each receiver."""
        caller = caller_of_request(request)
        return json_response(await self._context.test_notification(test_message(caller.uid)))
