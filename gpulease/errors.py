"""Every failure that a user can meet: what happened, what to do, and the codes it travels under.

An error's text reads *cannot X: why*; its hint says what to do next. The class knows its code (a
stable word for programs), its HTTP status (between daemon and command) and the exit code of the
command. Two places catch `GpuleaseError`: the command's edge and the server's edge. Anything else
is a bug and keeps its traceback.
"""

from errno import EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC
from typing import ClassVar

EXIT_OWN_FAILURE = 125
"""gpulease itself failed; the number that timeout(1) and env(1) use for the same."""
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_GAVE_UP = 75
"""EX_TEMPFAIL of sysexits(3): nothing is wrong, try again later."""
EXIT_TIME_LIMIT = 124
EXIT_USAGE = 2
EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits(3): a restart would fail in the same way."""
EXIT_TRY_AGAIN = EXIT_GAVE_UP
"""Of the daemon: it cannot start at this moment, and a restart may find things mended."""


_HINT = "\n\nhint: "


def with_hint(message: str, hint: str | None) -> str:
    """Return a message and, after a blank line, its hint: as people read it, and the database."""
    return f"{message}{_HINT}{hint}" if hint else message


def split_hint(text: str) -> tuple[str, str | None]:
    """Return the message and the hint that `with_hint` joined."""
    message, _, hint = text.partition(_HINT)
    return message, hint or None


class GpuleaseError(Exception):
    """A failure with a sentence for the user and, mostly, a hint."""

    code: ClassVar[str] = "failed"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = EXIT_OWN_FAILURE

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            # Where nobody catches it, the traceback shows what to do.
            self.add_note(f"hint: {hint}")

    def text(self) -> str:
        """Return the sentence and, after a blank line, the hint."""
        return with_hint(self.message, self.hint)


class BadValue(GpuleaseError):
    """Something that the user wrote cannot be read: a size, a time, a name."""

    code = "bad_value"
    http_status = 400


class BadUsage(GpuleaseError):
    """The command line does not say what to do."""

    code = "bad_usage"
    http_status = 400
    exit_code = EXIT_USAGE


class TooLarge(GpuleaseError):
    """A request is past one of the bounds that keep the daemon safe."""

    code = "too_large"
    http_status = 413


class TooMany(GpuleaseError):
    """The user has as many of something at once as one user may."""

    code = "too_many"
    http_status = 429


class TooSlow(GpuleaseError):
    """A request did not come to its end in time."""

    code = "too_slow"
    http_status = 408


class CannotLease(GpuleaseError):
    """The claim can never be granted on this machine."""

    code = "cannot_lease"
    http_status = 422


class NoRoomNow(GpuleaseError):
    """The claim could be granted, but not now, and the caller did not want to wait."""

    code = "no_room_now"
    http_status = 409
    exit_code = EXIT_GAVE_UP


class NoSuchJob(GpuleaseError):
    """No job has this id."""

    code = "no_such_job"
    http_status = 404


class NoSuchRoute(GpuleaseError):
    """The daemon does not know this request: it is older than the command, or newer."""

    code = "no_such_route"
    http_status = 404


class NoSuchGpu(GpuleaseError):
    """No GPU is called so, or more than one."""

    code = "no_such_gpu"
    http_status = 404


class NotAllowed(GpuleaseError):
    """The caller may not do this."""

    code = "not_allowed"
    http_status = 403


class WrongState(GpuleaseError):
    """The job is not in a state in which this can be done."""

    code = "wrong_state"
    http_status = 409


class AlreadyClaimed(GpuleaseError):
    """The process has begun to use its GPUs, so that a lease would come too late for it."""

    code = "already_claimed"
    http_status = 409


class AlreadyLeased(GpuleaseError):
    """The process has a lease already: its own, its job's, or that of the shell it belongs to."""

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
    """The worker of a job could not be started."""

    code = "launch_failed"


class LaunchDeferred(GpuleaseError):
    """The worker of a job cannot be started at this moment; it is tried again."""

    code = "launch_deferred"
    http_status = 503


class NoDaemon(GpuleaseError):
    """No daemon answers on the socket."""

    code = "no_daemon"
    http_status = 503


class NoGpus(GpuleaseError):
    """No driver or no GPU is here, and no simulation was asked for."""

    code = "no_gpus"
    http_status = 503


class BadConfiguration(GpuleaseError):
    """The daemon cannot start with the settings it was given."""

    code = "bad_configuration"
    exit_code = EXIT_CONFIGURATION


class SetupFailed(GpuleaseError):
    """gpulease cannot be installed on this machine, or removed from it, as it was asked."""

    code = "setup_failed"


class StateUnusable(GpuleaseError):
    """The daemon's state directory or database cannot be used as it is."""

    code = "state_unusable"
    exit_code = EXIT_CONFIGURATION


class StateUnwritable(GpuleaseError):
    """The daemon cannot start at this moment, as on a full disk; it is worth trying again."""

    code = "state_unwritable"
    exit_code = EXIT_TRY_AGAIN


class RecordUnwritable(GpuleaseError):
    """The daemon's record cannot be written at this moment, as on a full disk."""

    code = "record_unwritable"
    http_status = 503
    is_in_the_log = False
    """Whether an admin finds it in the log already."""


class RecordDamaged(RecordUnwritable):
    """The daemon's record was damaged while it ran; nothing new can be granted."""

    code = "record_damaged"


class LeaseKept(UserWarning):
    """A lease could not be given back, and lasts until its process ends."""


_PASSING = (ENOSPC, EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, EAGAIN)


def state_fault(what: str, error: OSError) -> GpuleaseError:
    """Return why a daemon cannot start with its state: StateUnwritable where that may pass."""
    why = f"{what}: {error.strerror or error}"
    if error.errno in _PASSING:
        return StateUnwritable(why, "see that the disk has room and is in order")
    return StateUnusable(why, "give a directory that this user can write with --state")


_KINDS: list[type[GpuleaseError]] = [GpuleaseError, *GpuleaseError.__subclasses__(), RecordDamaged]
BY_CODE: dict[str, type[GpuleaseError]] = {kind.code: kind for kind in _KINDS}
"""How the client finds the class again from the code in a response."""
