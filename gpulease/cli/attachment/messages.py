"""Messages about a job to which this command is attached."""

from __future__ import annotations

from gpulease.cli.attachment.keyboard import name_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.cli.attachment.mode import AttachMode


def stopping(label: str, reason: str) -> str | None:
    """Say that a job is being ended, and why; None if its own output says so."""
    match reason:
        case "time_limit":
            return f"gpulease: job {label} has reached its time limit and is ending"
        case "over_lease" | "idle":
            return None
        case "cancelled" | "":
            return f"gpulease: job {label} is ending"
        case _:
            from gpulease.drawing.words import clean

            return f"gpulease: job {label} is ending: {clean(reason)}"


def stopped(label: str, *, here: bool) -> str:
    """Say that a job is stopped, as by Ctrl-Z; `here` means that `fg` continues it."""
    how = "; fg continues it" if here else ""
    return f"gpulease: job {label} is stopped and keeps its lease{how}"


def left_running(label: str) -> str:
    """Say that this command stops and the job does not."""
    return f"gpulease: job {label} continues; fg returns to it"


def detached(label: str) -> str:
    """Say how to attach again."""
    return f"gpulease: detached from job {label}, which continues: gpulease attach {label}"


def attached(mode: AttachMode) -> str:
    """Say which keys do what."""
    if mode.watches:
        return f"gpulease: watching job {mode.label}; Ctrl-C stops watching"
    interrupts = [] if mode.passes_input else ["Ctrl-C interrupts it"]
    leaves = [f"{name_of(mode.keys)} detaches"] if mode.keys else []
    return "; ".join([f"gpulease: attached to job {mode.label}", *interrupts, *leaves])


def watching(mode: AttachMode) -> str:
    """Say that input does not reach the job."""
    if mode.on_terminal:
        return f"gpulease: another terminal writes to job {mode.label}; you are watching"
    return f"gpulease: the input of job {mode.label} is that of the command that started it"


def unwritable(trouble: str) -> str:
    """Say why our standard output cannot be written."""
    from gpulease.drawing.words import clean

    return f"gpulease: cannot write the job's output: {clean(trouble)}"


def awaiting(keys: bytes) -> str:
    """Say which key may follow the first of the detach keys."""
    first, rest = name_of(keys[:1]), name_of(keys[1:])
    return f"gpulease: {rest} detaches; {first} again sends it once; any other key sends both"


def input_as_it_is(label: str) -> str:
    """Say that the input of a job with a terminal comes from no terminal."""
    return f"gpulease: standard input is no terminal; it is passed to job {label} unchanged"


def skipped(label: str, amount: int) -> str:
    """Say that a watcher missed some output."""
    from gpulease.drawing.words import size

    return (
        f"gpulease: skipped {size(amount)} of output, which came faster than it was read: "
        f"gpulease logs {label}"
    )


def others_left(label: str) -> str:
    """Say why a job continues after its command has ended."""
    return f"gpulease: the command of job {label} has ended; processes that it started still run"
