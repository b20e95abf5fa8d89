"""Messages about a job to which this command is attached."""

from gpulease.cli.attachment.keyboard import name_of
from gpulease.cli.attachment.mode import AttachMode
from gpulease.cli.format import clean, size


def stopping(number: int, reason: str) -> str | None:
    """Say that a job is being ended, and why; None if its own output says so."""
    match reason:
        case "time_limit":
            return f"gpulease: job {number} has reached its time limit and is ending"
        case "over_lease" | "idle":
            return None
        case "cancelled" | "":
            return f"gpulease: job {number} is ending"
        case _:
            return f"gpulease: job {number} is ending: {clean(reason)}"


def stopped(number: int, *, here: bool) -> str:
    """Say that a job is stopped, as by Ctrl-Z; `here` means that `fg` continues it."""
    how = "; fg continues it" if here else ""
    return f"gpulease: job {number} is stopped and keeps its lease{how}"


def left_running(number: int) -> str:
    """Say that this command stops and the job does not."""
    return f"gpulease: job {number} continues; fg returns to it"


def detached(number: int) -> str:
    """Say how to attach again."""
    return f"gpulease: detached from job {number}, which continues: gpulease attach {number}"


def attached(mode: AttachMode) -> str:
    """Say which keys do what."""
    if mode.watches:
        return f"gpulease: watching job {mode.number}; Ctrl-C stops watching"
    interrupts = [] if mode.passes_input else ["Ctrl-C interrupts it"]
    leaves = [f"{name_of(mode.keys)} detaches"] if mode.keys else []
    return "; ".join([f"gpulease: attached to job {mode.number}", *interrupts, *leaves])


def watching(mode: AttachMode) -> str:
    """Say that input does not reach the job."""
    if mode.on_terminal:
        return f"gpulease: another terminal writes to job {mode.number}; you are watching"
    return f"gpulease: the input of job {mode.number} is that of the command that started it"


def unwritable(trouble: str) -> str:
    """Say why our standard output cannot be written."""
    return f"gpulease: cannot write the job's output: {clean(trouble)}"


def awaiting(keys: bytes) -> str:
    """Say which key may follow the first of the detach keys."""
    first, rest = name_of(keys[:1]), name_of(keys[1:])
    return f"gpulease: {rest} detaches; {first} again sends it once; any other key sends both"


def input_as_it_is(number: int) -> str:
    """Say that the input of a job with a terminal comes from no terminal."""
    return f"gpulease: standard input is no terminal; it is passed to job {number} unchanged"


def skipped(number: int, amount: int) -> str:
    """Say that a watcher missed some output."""
    return (
        f"gpulease: skipped {size(amount)} of output, which came faster than it was read: "
        f"gpulease logs {number}"
    )


def others_left(number: int) -> str:
    """Say why a job continues after its command has ended."""
    return f"gpulease: the command of job {number} has ended; processes that it started still run"
