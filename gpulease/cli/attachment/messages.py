"""What is said of a job to those who are attached to it."""

from gpulease.cli.attachment.keyboard import name_of
from gpulease.cli.attachment.mode import AttachMode
from gpulease.cli.format import clean, size


def stopping(number: int, reason: str) -> str | None:
    """Say that a job was asked to go, and why; None where its own output says so."""
    match reason:
        case "time_limit":
            return f"gpulease: job {number} has reached its time limit, and is asked to end"
        case "over_lease" | "idle":
            return None
        case "cancelled" | "":
            return f"gpulease: job {number} is asked to end"
        case _:
            return f"gpulease: job {number} is asked to end: {clean(reason)}"


def stopped(number: int, *, here: bool) -> str:
    """Say that a job was stopped as Ctrl-Z does; `here` means that `fg` continues it."""
    how = "; fg goes on" if here else ""
    return f"gpulease: job {number} is stopped and keeps its lease{how}"


def left_running(number: int) -> str:
    """Say that this command stops, and the job does not."""
    return f"gpulease: job {number} goes on; fg comes back to it"


def detached(number: int) -> str:
    """Say where to find a job again."""
    return f"gpulease: detached from job {number}, which goes on: gpulease attach {number}"


def attached(mode: AttachMode) -> str:
    """Say what can be typed, and what it does."""
    if mode.watches:
        return f"gpulease: watching job {mode.number}; Ctrl-C leaves it"
    interrupts = [] if mode.passes_input else ["Ctrl-C interrupts it"]
    leaves = [f"{name_of(mode.keys)} detaches"] if mode.keys else []
    return "; ".join([f"gpulease: attached to job {mode.number}", *interrupts, *leaves])


def watching(mode: AttachMode) -> str:
    """Say to someone who came to write that they do not."""
    if mode.on_terminal:
        return f"gpulease: another terminal writes to job {mode.number}; you are watching"
    return f"gpulease: the input of job {mode.number} is that of the command that started it"


def unwritable(trouble: str) -> str:
    """Say why our standard output takes nothing more."""
    return f"gpulease: cannot write the job's output: {clean(trouble)}"


def awaiting(keys: bytes) -> str:
    """Say what the first of the detach keys waits for."""
    first, rest = name_of(keys[:1]), name_of(keys[1:])
    return f"gpulease: {rest} detaches; {first} again passes it on; any other key passes both on"


def input_as_it_is(number: int) -> str:
    """Say that what a terminal's job gets to read comes from no terminal."""
    return f"gpulease: standard input is no terminal; job {number} gets it as it is"


def skipped(number: int, amount: int) -> str:
    """Say that a watcher has missed something."""
    return (
        f"gpulease: {size(amount)} of output skipped, too fast for this reader: "
        f"gpulease logs {number}"
    )


def others_left(number: int) -> str:
    """Say why a job goes on though its command has ended."""
    return f"gpulease: the command of job {number} has ended; what it started still runs"
