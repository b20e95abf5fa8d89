"""Stay with a job from the queue to its end, and say with what to exit.

The daemon may go and come meanwhile: the job is on its disk, and the streams are the shim's.

Watch a job through the daemon, and through any absence of the daemon, until it starts.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals as Signum

from gpulease.cli import messages
from gpulease.cli.attachment import AttachMode, Detached, Hooks, Left, TurnedAway, attach
from gpulease.cli.exit_codes import SIGNALED, JobEnd, last_words, status_of_ending, status_of_job
from gpulease.cli.format import clean, index_of
from gpulease.cli.messages import waiting_text
from gpulease.cli.render import StderrStatus, write_output
from gpulease.cli.signals import ENDING, EndedByInterrupt, Interrupted, Killed, Signals
from gpulease.client import Client
from gpulease.errors import GpuleaseError, NoDaemon, NotAllowed, TooMany
from gpulease.wire.frames import FrameKind
from gpulease.wire.views import JobView

_LOOKED_AT_EVERY = 10.0
"""Seconds between looks at a job that cannot be followed: many may be in the same place."""
SOUGHT_EVERY = 2.0
"""Seconds between looks for a daemon that went away."""
CANCELLED_WITHIN = 5.0
"""Seconds for the daemon to confirm that a job is cancelled; the user waits for the prompt."""
_NAMED = 2
"""Jobs waited for that are looked up and named; the others are counted."""
_HAS_A_WORKER = ("active", "releasing", "ended")


def wait_for_start(client: Client, job: JobView, signals: Signals, stderr: StderrStatus) -> JobView:
    """Return the job once it has a worker, or never will; say meanwhile how it stands.

    Raises:
        Interrupted: a signal that ends a wait came.
    """
    views = watch(client, job.id, signals, stderr)
    while job.state not in _HAS_A_WORKER:
        if job.state == "queued" or stderr.line.rewrites:
            blockers = signals.interruptible(partial(_blockers, client, job))
            stderr.line.show(waiting_text(job, blockers, stderr.now()), stderr.now())
        else:
            # It is granted: a line about its place in the queue that is still due is out of date.
            stderr.line.clear()
        job = signals.interruptible(partial(next, views, job))
    stderr.line.clear()
    for signum in signals.take():
        stderr.print(f"gpulease: {signum.name} came before the job did, and was dropped")
    return job


def wait_for_end(client: Client, job: JobView, signals: Signals, stderr: StderrStatus) -> JobView:
    """Return the job once it has ended.

    Raises:
        Interrupted: a signal that ends a wait came.
    """
    views = watch(client, job.id, signals, stderr)
    while job.state != "ended":
        job = signals.interruptible(partial(next, views, job))
    return job


def current(client: Client, job: JobView) -> JobView:
    """Return the job as it is now, or as it was where there is no daemon to ask."""
    with suppress(NoDaemon, TooMany):
        return client.job(job.id)
    return job


def watch(client: Client, number: int, signals: Signals, stderr: StderrStatus) -> Iterator[JobView]:
    """Yield the job as it changes, through any absence of the daemon."""
    told = turned_away = False
    while True:
        try:
            for job in client.watch(number):
                if told:
                    stderr.line.clear()
                    stderr.print(f"gpulease: the daemon is back; job {number} is {job.state}")
                told = False
                yield job
            return
        except TooMany as error:
            if not turned_away:
                stderr.line.clear()
                stderr.print(messages.not_followed(number, error))
            turned_away = True
            yield from _looked_at(client, number)
            time.sleep(_LOOKED_AT_EVERY)
        except NoDaemon:
            if not told:
                stderr.line.clear()
                stderr.print(
                    f"gpulease: the daemon has gone; job {number} is kept, and so is its turn"
                )
            told = True
            time.sleep(SOUGHT_EVERY)


def _looked_at(client: Client, number: int) -> Iterator[JobView]:
    """Yield the job as it is now, where the daemon tells."""
    with suppress(NoDaemon, TooMany):
        yield client.job(number)


def _blockers(client: Client, job: JobView) -> list[JobView]:
    found = []
    for number in job.waits_for[:_NAMED]:
        with suppress(GpuleaseError):
            found.append(client.job(number))
    return found


_JUDGED = 3.0
"""Seconds for the daemon to hear of the end of a job, and to see whether memory did not do."""
_JUDGED_IN_ANY_CASE = 60.0
"""The same where it matters, since the job may be tried again."""
_LOOKED_AT_AGAIN = 0.05
_NAMED_WITHIN = 2.0
"""Seconds for the daemon to tell the names of GPUs, which a shell waits for."""
_ATTACHES_WITHIN = 20.0
"""Seconds for a shim to open its socket once the daemon calls the job active."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """What a command stays with a job for."""

    started: bool = True
    """It is the command that started the job."""
    watches: bool = False
    keys: bytes = b""
    """Those that detach."""
    is_shell: bool = False
    """The job is a shell, whose user would like to know what they were given."""
    follows_retries: bool = False
    """A job that ran out of GPU memory is tried again, as another job."""


@dataclass(frozen=True, slots=True)
class JobFollower:
    """What came of being attached, or of being told why not."""

    attached: bool
    ending: JobEnd | None = None


def follow(
    client: Client, job: JobView, signals: Signals, stderr: StderrStatus, errand: FollowOptions
) -> int:
    """Return the exit code once the job has ended, or goes on without us.

    Raises:
        EndedByInterrupt: SIGINT ended the job.
        Killed: a signal ends this command. It has cancelled the job if the job waited and this
            command submitted it.
        NotAllowed: the job is someone else's.
    """
    while True:
        status, job = _follow(client, job, signals, stderr, errand)
        if job.retried_as is None or not errand.follows_retries:
            return status
        job = client.job(job.retried_as)


def _follow(
    client: Client, job: JobView, signals: Signals, stderr: StderrStatus, errand: FollowOptions
) -> tuple[int, JobView]:
    """Return the exit code of one job, and the job as it was last seen."""
    try:
        job = wait_for_start(client, job, signals, stderr)
        if errand.is_shell and job.state == "active":
            stderr.print(messages.shell_on(job, _gpus(client, job)))
        stay = _stay(client, job, signals, stderr, errand)
        if stay.ending is not None and stay.ending.signal == Signum.SIGINT:
            raise EndedByInterrupt(ctrl_c_typed=stay.ending.ctrl_c_typed)
        if stay.ending is not None:
            status = status_of_ending(stay.ending)
            return status, _judged(client, job, stderr, errand, status)
        return _after_the_fact(client, job, signals, stderr, errand, seen=stay.attached)
    except Interrupted as interrupted:
        _give_up(client, job, interrupted.signum, stderr, errand)
        raise Killed(interrupted.signum) from None
    except Left as left:
        if left.signum in ENDING - {Signum.SIGHUP}:
            raise Killed(left.signum) from None
        return SIGNALED + left.signum, job
    except Detached:
        return 0, job
    finally:
        stderr.line.clear()


def _judged(
    client: Client, job: JobView, stderr: StderrStatus, errand: FollowOptions, status: int
) -> JobView:
    """Return a job whose shim told us its end as the daemon knows it; say if memory did not do."""
    if status == 0 or not errand.started:
        return job
    deadline = time.monotonic() + (_JUDGED_IN_ANY_CASE if errand.follows_retries else _JUDGED)
    while job.state != "ended" and time.monotonic() < deadline:
        time.sleep(_LOOKED_AT_AGAIN)
        job = current(client.within(deadline - time.monotonic()), job)
    if job.out_of_memory and (words := last_words(job)):
        stderr.print(words)
    return job


def _gpus(client: Client, job: JobView) -> str:
    """Name the GPUs of a job as `status` does."""
    found = {}
    with suppress(GpuleaseError):
        found = {gpu.uuid: gpu for gpu in client.within(_NAMED_WITHIN).status().gpus}
    named = [
        f"GPU {index_of(gpu)} ({clean(gpu.name)})" if (gpu := found.get(lease.gpu)) else lease.gpu
        for lease in job.leases
    ]
    return " and ".join(named) or "a GPU"


def _stay(
    client: Client, job: JobView, signals: Signals, stderr: StderrStatus, errand: FollowOptions
) -> JobFollower:
    if job.state == "ended":
        return JobFollower(attached=False)
    hooks = Hooks(cancel=partial(_cancel, client, job.id), say=stderr.print)
    deadline = time.monotonic() + _ATTACHES_WITHIN
    while job.directory is not None and time.monotonic() < deadline:
        try:
            ending = attach(Path(job.directory), signals, hooks, _manner(job, errand))
            return JobFollower(attached=True, ending=ending)
        except TurnedAway as refusal:
            if not errand.started:
                raise _not_let_in(job.id, str(refusal)) from None
            stderr.print(f"gpulease: not attached to job {job.id}: {clean(str(refusal))}")
            return JobFollower(attached=True)
        except OSError:
            # Not listening yet, or not any more: the daemon knows which.
            job = current(client.within(deadline - time.monotonic()), job)
            if job.state == "ended":
                return JobFollower(attached=False)
            signals.interruptible(lambda: time.sleep(0.05))
    if not errand.started:
        raise _not_let_in(job.id, "its socket cannot be reached")
    stderr.print(f"gpulease: cannot attach to job {job.id}; see gpulease logs -f {job.id}")
    return JobFollower(attached=False)


def _manner(job: JobView, errand: FollowOptions) -> AttachMode:
    return AttachMode(
        number=job.id,
        started=errand.started,
        watches=errand.watches,
        on_terminal=job.terminal,
        keys=errand.keys,
    )


def _not_let_in(number: int, why: str) -> NotAllowed:
    return NotAllowed(
        f"cannot attach to job {number}: {clean(why)}", "only its owner and root may attach"
    )


def _cancel(client: Client, number: int) -> str | None:
    try:
        client.within(CANCELLED_WITHIN).cancel(number)
    except GpuleaseError as error:
        return f"gpulease: {clean(error.message)}"
    return None


def _after_the_fact(
    client: Client,
    job: JobView,
    signals: Signals,
    stderr: StderrStatus,
    errand: FollowOptions,
    *,
    seen: bool,
) -> tuple[int, JobView]:
    """Return the exit code, and the end, of a job whose shim did not tell us its end.

    Who started it gets all that it wrote.
    """
    job = wait_for_end(client, job, signals, stderr)
    if not errand.started and not seen:
        stderr.print(messages.ended(job))
        return status_of_job(job), job
    if not seen and job.started_at is not None:
        _print_kept(client, job.id, signals)
    if words := last_words(job):
        stderr.print(words)
    return status_of_job(job), job


def _print_kept(client: Client, number: int, signals: Signals) -> None:
    """Print all that the job wrote, through any absence of the daemon; no byte twice."""
    shown = dict.fromkeys((FrameKind.STDOUT, FrameKind.STDERR), 0)
    while True:
        try:
            for kind, piece in client.logs(number, begin=shown):
                write_output(kind, piece)
                shown[kind] += len(piece)
        except NoDaemon:
            signals.interruptible(partial(time.sleep, SOUGHT_EVERY))
        else:
            return


def _give_up(
    client: Client, job: JobView, signum: Signum, stderr: StderrStatus, errand: FollowOptions
) -> None:
    """Cancel a job that this command submitted, unless only the terminal was lost."""
    stderr.line.clear()
    if signum == Signum.SIGHUP:
        return
    if not errand.started:
        stderr.print(f"gpulease: job {job.id} is left as it is: gpulease attach {job.id}")
        return
    try:
        client.within(CANCELLED_WITHIN).cancel(job.id)
        stderr.print(f"gpulease: job {job.id} was cancelled")
    except GpuleaseError as error:
        stderr.print(
            f"gpulease: job {job.id} may not be cancelled: {clean(error.message)}\n\n"
            f"hint: gpulease cancel {job.id}"
        )
