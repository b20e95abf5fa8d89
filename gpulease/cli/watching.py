"""Watch a job through the daemon, and through any absence of the daemon, until it starts."""

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from gpulease.cli import sentences
from gpulease.cli.signals import Signals
from gpulease.cli.talk import Talk
from gpulease.cli.waiting import waiting_text
from gpulease.client import Client
from gpulease.errors import GpuleaseError, NoDaemon, TooMany
from gpulease.wire import JobView

_LOOKED_AT_EVERY = 10.0
"""Seconds between looks at a job that cannot be followed: many may be in the same place."""
SOUGHT_EVERY = 2.0
"""Seconds between looks for a daemon that went away."""
CANCELLED_WITHIN = 5.0
"""Seconds for the daemon to confirm that a job is cancelled; the user waits for the prompt."""
_NAMED = 2
"""Jobs waited for that are looked up and named; the others are counted."""
_HAS_A_WORKER = ("active", "releasing", "ended")


def wait_for_start(client: Client, job: JobView, signals: Signals, talk: Talk) -> JobView:
    """Return the job once it has a worker, or never will; say meanwhile how it stands.

    Raises:
        Interrupted: a signal that ends a wait came.
    """
    views = watch(client, job.id, signals, talk)
    while job.state not in _HAS_A_WORKER:
        if job.state == "queued" or talk.line.rewrites:
            blockers = signals.interruptible(partial(_blockers, client, job))
            talk.line.show(waiting_text(job, blockers, talk.now()), talk.now())
        else:
            # It is granted: a line about its place in the queue that is still due is out of date.
            talk.line.clear()
        job = signals.interruptible(partial(next, views, job))
    talk.line.clear()
    for signum in signals.take():
        talk.say(f"gpulease: {signum.name} came before the job did, and was dropped")
    return job


def wait_for_end(client: Client, job: JobView, signals: Signals, talk: Talk) -> JobView:
    """Return the job once it has ended.

    Raises:
        Interrupted: a signal that ends a wait came.
    """
    views = watch(client, job.id, signals, talk)
    while job.state != "ended":
        job = signals.interruptible(partial(next, views, job))
    return job


def current(client: Client, job: JobView) -> JobView:
    """Return the job as it is now, or as it was where there is no daemon to ask."""
    with suppress(NoDaemon, TooMany):
        return client.job(job.id)
    return job


def watch(client: Client, number: int, signals: Signals, talk: Talk) -> Iterator[JobView]:
    """Yield the job as it changes, through any absence of the daemon."""
    told = turned_away = False
    while True:
        try:
            for job in client.watch(number):
                if told:
                    talk.line.clear()
                    talk.say(f"gpulease: the daemon is back; job {number} is {job.state}")
                told = False
                yield job
            return
        except TooMany as error:
            if not turned_away:
                talk.line.clear()
                talk.say(sentences.not_followed(number, error))
            turned_away = True
            yield from _looked_at(client, number)
            time.sleep(_LOOKED_AT_EVERY)
        except NoDaemon:
            if not told:
                talk.line.clear()
                talk.say(f"gpulease: the daemon has gone; job {number} is kept, and so is its turn")
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
