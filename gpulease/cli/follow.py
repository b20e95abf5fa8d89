"""Stay with a job from the queue to its end, as `run` does, and say with what to exit.

The daemon may go and come meanwhile: the job is on its disk, and the streams are the shim's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from signal import Signals as Signum

from gpulease.cli.attach import Ending, Hooks, Left, TurnedAway, attach
from gpulease.cli.outcome import SIGNALED, last_words, status_of_ending, status_of_job
from gpulease.cli.render import pass_on
from gpulease.cli.signals import Interrupted, Signals
from gpulease.cli.text import clean
from gpulease.cli.waiting import WaitingLine, waiting_text
from gpulease.client import Client
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.frames import FrameKind
from gpulease.wire import JobView

SOUGHT_EVERY = 2.0
"""Seconds between looks for a daemon that went away."""
_ATTACHES_WITHIN = 20.0
"""Seconds for a shim to open its socket once the daemon calls the job active."""
_NAMED = 2
"""Jobs waited for that are looked up and named; the others are counted."""
_HAS_A_WORKER = ("active", "releasing", "ended")


@dataclass(frozen=True, slots=True)
class Talk:
    """How the command speaks, and what it knows of the time."""

    say: Callable[[str], None]
    line: WaitingLine
    now: Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Stay:
    """What came of being attached, or of being told why not."""

    attached: bool
    ending: Ending | None = None


def follow(client: Client, job: JobView, signals: Signals, talk: Talk) -> int:
    """Return the exit code of `run` once the job has ended, or goes on without us."""
    try:
        job = _wait_for_start(client, job, signals, talk)
        stay = _stay(client, job, signals, talk)
        if stay.ending is not None:
            return status_of_ending(stay.ending)
        return _after_the_fact(client, job, signals, talk, seen=stay.attached)
    except Interrupted as interrupted:
        return _give_up(client, job, interrupted.signum, talk)
    except Left:
        return SIGNALED + Signum.SIGHUP
    finally:
        talk.line.clear()


def _wait_for_start(client: Client, job: JobView, signals: Signals, talk: Talk) -> JobView:
    views = _watch(client, job.id, signals, talk)
    while job.state not in _HAS_A_WORKER:
        if job.state == "queued" or talk.line.rewrites:
            talk.line.show(waiting_text(job, _blockers(client, job), talk.now()), talk.now())
        job = signals.interruptible(partial(next, views, job))
    talk.line.clear()
    for signum in signals.take():
        talk.say(f"gpulease: {signum.name} came before the job did, and was dropped")
    return job


def _blockers(client: Client, job: JobView) -> list[JobView]:
    found = []
    for number in job.waits_for[:_NAMED]:
        with suppress(GpuleaseError):
            found.append(client.job(number))
    return found


def _watch(client: Client, number: int, signals: Signals, talk: Talk) -> Iterator[JobView]:
    """Yield the job as it changes, through any absence of the daemon."""
    told = False
    while True:
        try:
            for job in client.watch(number):
                if told:
                    talk.line.clear()
                    talk.say(f"gpulease: the daemon is back; job {number} is {job.state}")
                told = False
                yield job
            return
        except NoDaemon:
            if not told:
                talk.line.clear()
                talk.say(f"gpulease: the daemon has gone; job {number} is kept, and so is its turn")
            told = True
        time.sleep(SOUGHT_EVERY)


def _stay(client: Client, job: JobView, signals: Signals, talk: Talk) -> Stay:
    if job.state == "ended":
        return Stay(attached=False)
    hooks = _hooks(client, job.id, talk)
    deadline = time.monotonic() + _ATTACHES_WITHIN
    while job.directory is not None and time.monotonic() < deadline:
        try:
            ending = attach(Path(job.directory), signals, hooks)
            return Stay(attached=True, ending=ending)
        except TurnedAway as refusal:
            talk.say(f"gpulease: not attached to job {job.id}: {clean(str(refusal))}")
            return Stay(attached=True)
        except OSError:
            # Not listening yet, or not any more: the daemon knows which.
            job = _current(client, job)
            if job.state == "ended":
                return Stay(attached=False)
            signals.interruptible(lambda: time.sleep(0.05))
    talk.say(f"gpulease: cannot attach to job {job.id}; see gpulease logs -f {job.id}")
    return Stay(attached=False)


def _hooks(client: Client, number: int, talk: Talk) -> Hooks:
    return Hooks(
        cancel=lambda: _cancel(client, number, talk),
        stopping=lambda reason: talk.say(_stopping(number, reason)),
        unwritable=lambda why: talk.say(f"gpulease: cannot write the job's output: {clean(why)}"),
    )


def _current(client: Client, job: JobView) -> JobView:
    with suppress(NoDaemon):
        return client.job(job.id)
    return job


def _cancel(client: Client, number: int, talk: Talk) -> bool:
    try:
        client.cancel(number)
    except GpuleaseError as error:
        talk.say(f"gpulease: {clean(error.message)}")
        return False
    return True


def _stopping(number: int, reason: str) -> str:
    match reason:
        case "time_limit":
            return f"gpulease: job {number} has reached its time limit, and is asked to end"
        case "cancelled" | "":
            return f"gpulease: job {number} is asked to end"
        case _:
            return f"gpulease: job {number} is asked to end: {clean(reason)}"


def _after_the_fact(
    client: Client, job: JobView, signals: Signals, talk: Talk, *, seen: bool
) -> int:
    """Return the exit code of a job whose shim did not tell us its end; print what was not seen."""
    views = _watch(client, job.id, signals, talk)
    while job.state != "ended":
        job = signals.interruptible(partial(next, views, job))
    if not seen and job.started_at is not None:
        _print_kept(client, job.id, signals)
    if words := last_words(job):
        talk.say(words)
    return status_of_job(job)


def _print_kept(client: Client, number: int, signals: Signals) -> None:
    """Print all that the job wrote, through any absence of the daemon; no byte twice."""
    shown = dict.fromkeys((FrameKind.STDOUT, FrameKind.STDERR), 0)
    while True:
        try:
            for kind, piece in client.logs(number, begin=shown):
                pass_on(kind, piece)
                shown[kind] += len(piece)
        except NoDaemon:
            signals.interruptible(partial(time.sleep, SOUGHT_EVERY))
        else:
            return


def _give_up(client: Client, job: JobView, signum: Signum, talk: Talk) -> int:
    talk.line.clear()
    if signum != Signum.SIGHUP:
        with suppress(GpuleaseError):
            client.cancel(job.id)
            talk.say(f"gpulease: job {job.id} was cancelled")
            return SIGNALED + signum
        talk.say(
            f"gpulease: job {job.id} could not be cancelled, and goes on: gpulease cancel {job.id}"
        )
    return SIGNALED + signum
