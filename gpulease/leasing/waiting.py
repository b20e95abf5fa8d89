"""Wait until a lease is granted, through any absence of the daemon."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self, TypeVar

from gpulease.client import Client
from gpulease.errors import GpuleaseError, NoDaemon, NoRoomNow
from gpulease.wire import EnvironmentView, HoldRequest, JobView, spoken

_log = logging.getLogger("gpulease")

SOUGHT_EVERY = 1.0
"""Seconds between looks for a daemon that went away."""
SPEAKS_AFTER = 1.0
"""Seconds in the queue before that is worth a word: most leases are granted at once."""
SPEAKS_EVERY = 30.0
_LONGER = "wait=None waits for as long as it takes, wait='30m' gives up after a while"
_SETTLED = ("active", "releasing", "ended")

Result = TypeVar("Result")


@contextmanager
def granted(client: Client, request: HoldRequest) -> Iterator[tuple[JobView, EnvironmentView]]:
    """Queue a lease and yield it once it is held, with its environment.

    Whatever interrupts the wait or the block, Ctrl-C included, gives the lease back.

    Raises:
        NoRoomNow: it was not to wait for so long.
        GpuleaseError: it will never be granted, or somebody cancelled it.
    """
    job = _asked_for(client, request)
    try:
        job = _until_held(client, job)
        yield job, _through_absence(lambda: client.environment(job.id))
    except BaseException:
        _cancel(client, job)
        raise


def _asked_for(client: Client, request: HoldRequest) -> JobView:
    """Queue the lease, in a thread: a Ctrl-C that cuts off the answer would lose track of it."""
    with ThreadPoolExecutor(1, "gpulease") as thread:
        answer = thread.submit(client.hold, request)
        try:
            return answer.result()
        except NoRoomNow as error:
            raise NoRoomNow(error.message, _LONGER) from None
        except KeyboardInterrupt:
            answer.add_done_callback(partial(_cancel_late, client))
            raise


def _cancel_late(client: Client, answer: Future[JobView]) -> None:
    if answer.exception() is None:
        _cancel(client, answer.result())


def _cancel(client: Client, job: JobView) -> None:
    with suppress(GpuleaseError):
        client.cancel(job.id)


def _until_held(client: Client, job: JobView) -> JobView:
    views = _watch(client, job.id)
    with _Speaker() as speaker:
        while job.state not in _SETTLED:
            job = next(views)
            speaker.waits(job)
    if job.state != "active":
        raise _not_granted(job)
    return job


def _not_granted(job: JobView) -> GpuleaseError:
    why = job.reason or spoken(job.outcome or "it has ended")
    if job.outcome == "gave_up":
        return NoRoomNow(f"cannot lease now: {why}", _LONGER)
    return GpuleaseError(f"cannot lease: job {job.id} was never granted: {why}", job.hint)


def _watch(client: Client, number: int) -> Iterator[JobView]:
    """Yield the lease as it changes, with no end but that of the caller's patience."""
    while True:
        with suppress(NoDaemon):
            yield from client.watch(number)
        _log.debug("no daemon answers on %s; job %s keeps its turn", client.path, number)
        time.sleep(SOUGHT_EVERY)


def _through_absence(ask: Callable[[], Result]) -> Result:
    while True:
        with suppress(NoDaemon):
            return ask()
        time.sleep(SOUGHT_EVERY)


class _Speaker:
    """Says why it takes so long: to the logger `gpulease`, by default on stderr."""

    def __init__(self) -> None:
        self._text = ""
        self._said: str | None = None
        self._said_at = 0.0
        self._patience = threading.Timer(SPEAKS_AFTER, self._say)
        self._patience.daemon = True

    def __enter__(self) -> Self:
        self._patience.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patience.cancel()

    def waits(self, job: JobView) -> None:
        place = f", number {job.position} in line" if job.position else ""
        self._text = f"job {job.id} waits{place}" + (f": {job.reason}" if job.reason else "")
        new = self._said is not None and self._text != self._said
        if job.state == "queued" and new and time.monotonic() - self._said_at >= SPEAKS_EVERY:
            self._say()

    def _say(self) -> None:
        self._said, self._said_at = self._text, time.monotonic()
        _log.warning("gpulease: %s", self._text)
