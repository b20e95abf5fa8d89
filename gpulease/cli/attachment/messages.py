"""Messages about a job to a user who is attached to it."""

from gpulease.cli.attachment.keyboard import name_of
from gpulease.cli.attachment.mode import AttachMode
from gpulease.cli.format import clean, size


def stopping(number: int, reason: str) -> str | None:
    """Say that a job is being stopped, and why; None if the job's output says so."""
    match reason:
        case "time_limit":
            return f"gpulease: job {number} has reached its time limit and is being stopped"
        case "over_lease" | "idle":
            return None
        case "cancelled" | "":
            return f"gpulease: job {number} is being stopped"
        case _:
            return f"gpulease: job {number} is being stopped: {clean(reason)}"


def stopped(number: int, *, here: bool) -> str:
    """Say that a job was suspended as by Ctrl-Z; `here` means that `fg` continues it."""
    how = "; fg continues it" if here else ""
    return f"gpulease: job {number} is suspended and keeps its lease{how}"


def left_running(number: int) -> str:
    """Say that this command is suspended and the job is not."""
    return f"gpulease: job {number} continues; fg attaches to it again"


def detached(number: int) -> str:
    """Say how to attach to the job again."""
    return f"gpulease: detached from job {number}, which continues; gpulease attach {number}"


def attached(mode: AttachMode) -> str:
    """Say which keys do what."""
    if mode.watches:
        return f"gpulease: watching job {mode.number}; Ctrl-C detaches"
    interrupts = [] if mode.passes_input else ["Ctrl-C interrupts it"]
    leaves = [f"{name_of(mode.keys)} detaches"] if mode.keys else []
    return "; ".join([f"gpulease: attached to job {mode.number}", *interrupts, *leaves])


def watching(mode: AttachMode) -> str:
    """Say that this terminal does not write to the job."""
    if mode.on_terminal:
        return f"gpulease: another terminal controls job {mode.number}; this one only shows it"
    return f"gpulease: job {mode.number} reads its input from the command that started it"


def unwritable(trouble: str) -> str:
    """Say why standard output cannot be written."""
    return f"gpulease: cannot write the job's output: {clean(trouble)}"


def awaiting(keys: bytes) -> str:
    """Say what can follow the first detach key."""
    first, rest = name_of(keys[:1]), name_of(keys[1:])
    return f"gpulease: {rest} detaches; {first} again sends it once; any other key sends both"


def input_as_it_is(number: int) -> str:
    """Say that the input of a job with a terminal does not come from a terminal."""
    return f"gpulease: standard input is not a terminal; job {number} gets it unchanged"


def skipped(number: int, amount: int) -> str:
    """Say that output was skipped."""
    return (
        f"gpulease: skipped {size(amount)} of output, too fast for this reader; "
        f"see gpulease logs {number}"
    )


def others_left(number: int) -> str:
    """Say why a job continues after its command has ended."""
    return f"gpulease: the command of job {number} has ended; processes that it started still run"
