"""The shape of the daemon's answer to a request that fails."""

from dataclasses import dataclass


@dataclass(slots=True)
class ErrorBody:
    """What went wrong: a stable code for programs, a message, and a hint if there is one."""

    code: str
    message: str
    hint: str | None = None


@dataclass(slots=True)
class ErrorReply:
    """The body of every response that is not a success (2xx)."""

    error: ErrorBody
