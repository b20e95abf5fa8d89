"""The shape of the daemon's answer to a request that fails."""

from dataclasses import dataclass


@dataclass(slots=True)
class ErrorBody:
    """What went wrong: a stable code for programs, a message, and a hint if there is one."""

    code: str
    message: str
    hint: str | None = None
    field: str | None = None
    """The field of the request that it is about, such as claim.gpus; `message` names it too."""
    value: str | None = None
    reason: str | None = None
    """Why `value` cannot be used there."""


@dataclass(slots=True)
class ErrorReply:
    """The body of every response that is not a success (2xx)."""

    error: ErrorBody
