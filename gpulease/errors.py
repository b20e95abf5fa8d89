"""Every failure that a user can meet, with its codes.

The message reads *cannot X: why*, and the hint says what to do. The class has a code (a stable word
for programs), an HTTP status (between daemon and command) and the exit code of the command. Only
the edges of the command and of the server catch `GpuleaseError`. Anything else is a bug and keeps
its traceback.
"""

from __future__ import annotations

from errno import EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar, Self

EXIT_OWN_FAILURE = 125
"""gpulease itself failed; the same code as in timeout(1) and env(1)."""
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_GAVE_UP = 75
"""EX_TEMPFAIL of sysexits(3): try again later."""
EXIT_TIME_LIMIT = 124
EXIT_USAGE = 2
EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits(3): a restart would fail as well."""
EXIT_TRY_AGAIN = EXIT_GAVE_UP
"""Of the daemon: it cannot start now, and a later restart may succeed."""


_HINT = "\n\nhint: "


def with_hint(message: str, hint: str | None) -> str:
    """Return a message and, after a blank line, its hint: as people read it, and the database."""
    return f"{message}{_HINT}{hint}" if hint else message


def split_hint(text: str) -> tuple[str, str | None]:
    """Return the message and the hint that `with_hint` joined."""
    message, _, hint = text.partition(_HINT)
    return message, hint or None


class GpuleaseError(Exception):
    """gpulease failed: a message for the user and, in most cases, a hint."""

    code: ClassVar[str] = "failed"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = EXIT_OWN_FAILURE
    parts: tuple[str, str, str] | None = None
    """The field of a request that it is about, the value, and why that cannot be used."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint and hasattr(self, "add_note"):  # from Python 3.11 on
            # An uncaught error shows its hint in the traceback.
            self.add_note(f"hint: {hint}")

    @classmethod
    def of_field(cls, field: str, value: object, reason: str, hint: str | None = None) -> Self:
        """Return the error about a value of a field of a request, such as claim.gpus."""
        error = cls(f"cannot use {field} {value}: {reason}", hint)
        error.parts = field, str(value), reason
        return error

    def called(self, name: str) -> Self:
        """Return the error about a field with another name for it, as a user writes it: --gpus."""
        if self.parts is None:
            return self
        field, value, reason = self.parts
        error = type(self)(
            f"cannot use {name}{'' if name[-1] == '=' else ' '}{value}: {reason}", self.hint
        )
        error.parts = field, value, reason
        return error

    def text(self) -> str:
        """Return the message and, after a blank line, the hint."""
        return with_hint(self.message, self.hint)


class BadValue(GpuleaseError):
    """A value cannot be read or used: a size, a time, a name."""

    code = "bad_value"
    http_status = 400
    exit_code = EXIT_USAGE


class BadUsage(GpuleaseError):
    """The command line cannot be understood."""

    code = "bad_usage"
    http_status = 400
    exit_code = EXIT_USAGE


class TooLarge(GpuleaseError):
    """A request exceeds a limit that protects the daemon or is the kernel's."""

    code = "too_large"
    http_status = 413


class TooMany(GpuleaseError):
    """The user has reached a limit for one user, such as waiting jobs."""

    code = "too_many"
    http_status = 429


class TooSlow(GpuleaseError):
    """A request did not arrive completely in time."""

    code = "too_slow"
    http_status = 408


class CannotLease(GpuleaseError):
    """The claim can never be granted on this machine."""

    code = "cannot_lease"
    http_status = 422


class NoRoomNow(GpuleaseError):
    """The claim cannot be granted now, and the caller does not want to wait."""

    code = "no_room_now"
    http_status = 409
    exit_code = EXIT_GAVE_UP


class NoSuchJob(GpuleaseError):
    """No job has this number, or no job of the caller this name."""

    code = "no_such_job"
    http_status = 404


class NoSuchRoute(GpuleaseError):
    """The daemon does not know this request: it has another version than the command."""

    code = "no_such_route"
    http_status = 404


class NoSuchGpu(GpuleaseError):
    """No GPU has this name, or several have."""

    code = "no_such_gpu"
    http_status = 404


class NoSuchWindow(GpuleaseError):
    """No window has this name."""

    code = "no_such_window"
    http_status = 404


class WindowClash(GpuleaseError):
    """Two windows need the same GPUs, or have the same name."""

    code = "window_clash"
    http_status = 409


class NotAllowed(GpuleaseError):
    """The caller may not do this."""

    code = "not_allowed"
    http_status = 403


class WrongState(GpuleaseError):
    """The job is not in a state in which this can be done."""

    code = "wrong_state"
    http_status = 409


class AlreadyClaimed(GpuleaseError):
    """The process already uses its GPUs: a lease would come too late."""

    code = "already_claimed"
    http_status = 409


class AlreadyLeased(GpuleaseError):
    """The process already has a lease: its own, its job's, or its shell's."""

    code = "already_leased"
    http_status = 409


class WithinLease(GpuleaseError):
    """The calling process runs within the lease of a job, and a second job was not asked for."""

    code = "within_lease"
    http_status = 409


class CallFailed(GpuleaseError):
    """The job of a call of an Executor ended without a result."""

    code = "call_failed"
    job: int | None = None
    """The id of the job."""


class CommandNotFound(GpuleaseError):
    """The command of the job does not exist."""

    code = "command_not_found"
    http_status = 422
    exit_code = EXIT_NOT_FOUND


class CommandNotExecutable(GpuleaseError):
    """The command of the job cannot be executed."""

    code = "command_not_executable"
    http_status = 422
    exit_code = EXIT_NOT_EXECUTABLE


class LaunchFailed(GpuleaseError):
    """The worker of the job could not be started."""

    code = "launch_failed"


class LaunchDeferred(GpuleaseError):
    """The worker of the job cannot be started now; the daemon tries again."""

    code = "launch_deferred"
    http_status = 503


class NoDaemon(GpuleaseError):
    """No daemon answers on the socket."""

    code = "no_daemon"
    http_status = 503


class AnswerLost(NoDaemon):
    """The request was sent and the answer is missing: the daemon may have done it."""


class NotTrusted(NoDaemon):
    """The socket belongs to another user."""


class NoGpus(GpuleaseError):
    """This machine has no driver or no GPU, and none is simulated."""

    code = "no_gpus"
    http_status = 503


class BadConfiguration(GpuleaseError):
    """The daemon cannot start with these settings."""

    code = "bad_configuration"
    exit_code = EXIT_CONFIGURATION


class SetupFailed(GpuleaseError):
    """gpulease cannot be installed or removed."""

    code = "setup_failed"


class StateUnusable(GpuleaseError):
    """The state directory or the database of the daemon cannot be used."""

    code = "state_unusable"
    exit_code = EXIT_CONFIGURATION


class StateUnwritable(GpuleaseError):
    """The daemon cannot start now, for example on a full disk; it may succeed later."""

    code = "state_unwritable"
    exit_code = EXIT_TRY_AGAIN


class RecordUnwritable(GpuleaseError):
    """The database of the daemon cannot be written now, for example on a full disk."""

    code = "record_unwritable"
    http_status = 503
    is_in_the_log = False
    """Whether it is already in the log."""


class RecordLocked(RecordUnwritable):
    """Another program has locked the database of the daemon; submissions wait for it."""

    code = "record_locked"


class RecordDamaged(RecordUnwritable):
    """The database of the daemon is damaged; nothing new can be granted."""

    code = "record_damaged"


class SlurmFailed(GpuleaseError):
    """A command of Slurm failed, or did not answer in time."""

    code = "slurm_failed"
    http_status = 503


class LeaseKept(UserWarning):
    """A lease could not be released, and lasts until its process ends."""


_TEMPORARY = (ENOSPC, EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, EAGAIN)


def state_fault(what: str, error: OSError) -> GpuleaseError:
    """Return why a daemon cannot use its state: StateUnwritable if that may be temporary."""
    why = f"{what}: {error.strerror or error}"
    if error.errno in _TEMPORARY:
        return StateUnwritable(why, "make sure that the disk has space and works")
    return StateUnusable(why, "use --state with a directory that this user can write")


_KINDS: list[type[GpuleaseError]] = [
    GpuleaseError,
    *GpuleaseError.__subclasses__(),
    *RecordUnwritable.__subclasses__(),
]
BY_CODE: dict[str, type[GpuleaseError]] = {kind.code: kind for kind in _KINDS}
"""The class of each code, for the client."""
