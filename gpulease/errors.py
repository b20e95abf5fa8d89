"""Every failure that a user can meet: what happened, what to do, and the codes it travels under.

The message reads *cannot X: why*; the hint says what to do next. The class has a code (a stable
word for programs), an HTTP status (between daemon and command) and the exit code of the command.
`GpuleaseError` is caught in two places: by the command and by the server. Any other exception is a
bug and keeps its traceback.
"""

from errno import EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC
from typing import ClassVar

EXIT_OWN_FAILURE = 125
"""gpulease itself failed; timeout(1) and env(1) use the same number."""
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_GAVE_UP = 75
"""EX_TEMPFAIL of sysexits(3): try again later."""
EXIT_TIME_LIMIT = 124
EXIT_USAGE = 2
EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits(3): a restart would fail in the same way."""
EXIT_TRY_AGAIN = EXIT_GAVE_UP
"""The daemon cannot start now; a later restart may succeed."""


_HINT = "\n\nhint: "


def with_hint(message: str, hint: str | None) -> str:
    """Return a message and, after a blank line, its hint: as people read it, and the database."""
    return f"{message}{_HINT}{hint}" if hint else message


def split_hint(text: str) -> tuple[str, str | None]:
    """Return the message and the hint that `with_hint` joined."""
    message, _, hint = text.partition(_HINT)
    return message, hint or None


class GpuleaseError(Exception):
    """A failure with a message for the user and, in most cases, a hint."""

    code: ClassVar[str] = "failed"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = EXIT_OWN_FAILURE

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            # Shown with the traceback if nothing catches the error.
            self.add_note(f"hint: {hint}")

    def text(self) -> str:
        """Return the message and, after a blank line, the hint."""
        return with_hint(self.message, self.hint)


class BadValue(GpuleaseError):
    """A value, such as a size, a time or a name, cannot be read or is out of range."""

    code = "bad_value"
    http_status = 400


class BadUsage(GpuleaseError):
    """The command line is incomplete or contradicts itself."""

    code = "bad_usage"
    http_status = 400
    exit_code = EXIT_USAGE


class TooLarge(GpuleaseError):
    """A request exceeds a limit of the daemon."""

    code = "too_large"
    http_status = 413


class TooMany(GpuleaseError):
    """The user has reached a limit, such as that of open connections."""

    code = "too_many"
    http_status = 429


class TooSlow(GpuleaseError):
    """A request did not arrive in time."""

    code = "too_slow"
    http_status = 408


class CannotLease(GpuleaseError):
    """The claim can never be granted on this machine."""

    code = "cannot_lease"
    http_status = 422


class NoRoomNow(GpuleaseError):
    """The claim cannot be granted now, and the time to wait is over or zero."""

    code = "no_room_now"
    http_status = 409
    exit_code = EXIT_GAVE_UP


class NoSuchJob(GpuleaseError):
    """No job has this number."""

    code = "no_such_job"
    http_status = 404


class NoSuchRoute(GpuleaseError):
    """The daemon does not know this request: it is of another version than the command."""

    code = "no_such_route"
    http_status = 404


class NoSuchGpu(GpuleaseError):
    """No GPU has this name, or several have."""

    code = "no_such_gpu"
    http_status = 404


class NotAllowed(GpuleaseError):
    """The caller may not do this."""

    code = "not_allowed"
    http_status = 403


class WrongState(GpuleaseError):
    """The state of the job does not allow this."""

    code = "wrong_state"
    http_status = 409


class AlreadyClaimed(GpuleaseError):
    """The process has used its GPUs already, so a lease would have no effect."""

    code = "already_claimed"
    http_status = 409


class AlreadyLeased(GpuleaseError):
    """The process has a lease already: its own, or that of its job or shell."""

    code = "already_leased"
    http_status = 409


class CommandNotFound(GpuleaseError):
    """The command of the job does not exist."""

    code = "command_not_found"
    http_status = 422
    exit_code = EXIT_NOT_FOUND


class CommandNotExecutable(GpuleaseError):
    """The command of the job exists and cannot be executed."""

    code = "command_not_executable"
    http_status = 422
    exit_code = EXIT_NOT_EXECUTABLE


class LaunchFailed(GpuleaseError):
    """The worker of a job cannot be started."""

    code = "launch_failed"


class LaunchDeferred(GpuleaseError):
    """The worker of a job cannot be started now; the daemon tries again."""

    code = "launch_deferred"
    http_status = 503


class NoDaemon(GpuleaseError):
    """No daemon answers on the socket."""

    code = "no_daemon"
    http_status = 503


class NoGpus(GpuleaseError):
    """The machine has no driver or no GPU, and no simulation was requested."""

    code = "no_gpus"
    http_status = 503


class BadConfiguration(GpuleaseError):
    """The daemon cannot start with its settings."""

    code = "bad_configuration"
    exit_code = EXIT_CONFIGURATION


class SetupFailed(GpuleaseError):
    """gpulease-setup cannot install or remove gpulease."""

    code = "setup_failed"


class StateUnusable(GpuleaseError):
    """The state directory or the database of the daemon cannot be used."""

    code = "state_unusable"
    exit_code = EXIT_CONFIGURATION


class StateUnwritable(GpuleaseError):
    """The state directory cannot be written now, as on a full disk; trying again may help."""

    code = "state_unwritable"
    exit_code = EXIT_TRY_AGAIN


class RecordUnwritable(GpuleaseError):
    """The database of the daemon cannot be written now, as on a full disk."""

    code = "record_unwritable"
    http_status = 503
    is_in_the_log = False
    """Whether the log has it already."""


class RecordDamaged(RecordUnwritable):
    """The database of the daemon was damaged while it ran; no more leases are granted."""

    code = "record_damaged"


class LeaseKept(UserWarning):
    """A lease cannot be released before its process ends."""


_PASSING = (ENOSPC, EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, EAGAIN)


def state_fault(what: str, error: OSError) -> GpuleaseError:
    """Return why a daemon cannot start with its state: StateUnwritable if trying again may help."""
    why = f"{what}: {error.strerror or error}"
    if error.errno in _PASSING:
        return StateUnwritable(why, "check the disk and its free space")
    return StateUnusable(why, "pass a directory that this user can write with --state")


_KINDS: list[type[GpuleaseError]] = [GpuleaseError, *GpuleaseError.__subclasses__(), RecordDamaged]
BY_CODE: dict[str, type[GpuleaseError]] = {kind.code: kind for kind in _KINDS}
"""The class for the code in a response."""
