"""Sends the notifications that are on record, and stores how that went.

Each user has at most one message at a time on the way. A sender may hang until its deadline: it
delays other messages of its user alone.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, TypeVar

from gpulease.domain.job import one_line
from gpulease.domain.notifications import LISTED, Message, MessageBudget, Notification, collected
from gpulease.errors import RecordUnwritable
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import Clock, Event, InThread

T = TypeVar("T")

_log = logging.getLogger(__name__)

PAUSES = (
    timedelta(seconds=10),
    timedelta(minutes=1),
    timedelta(minutes=10),
    timedelta(hours=1),
)
"""The times between attempts: a restart of the receiver, its maintenance, and an outage. After the
last one the message is given up: it is too old."""
AT_ONCE = 8
"""Users to whom messages are sent at the same time: each takes a process of some 50 MiB."""
_HELD_FOR_S = 40.0
"""For which an attempt counts among them. The shim of the sender ends it sooner, unless its file
system hangs."""
_GATHER_S = 0.2
"""Time for more messages to arrive: many jobs may end at once."""
_TRY_AGAIN_S = 5.0
"""After the database could not be written."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one attempt to send a message went."""

    error: str | None = None
    """Why not all receivers have it, in one line without secrets; None: they have."""
    is_final: bool = False
    """Another attempt would fail in the same way."""


class Sender(Protocol):
    """Sends a message as its user."""

    async def send(self, sent: Notification) -> Delivery | None:
        """Make one attempt, at most once for each number of attempts.

        None: nothing could be started now.
        """

    async def clean(self, pending: frozenset[int]) -> None:
        """Remove what is left of all notifications but these."""

    async def forget(self, notification: int) -> None:
        """Remove what is left of a notification."""


class Records(Protocol):
    """The notifications on record. Called in the thread that writes."""

    def pending_users(self) -> dict[int, datetime]:
        """Return the users with notifications to be sent, and when each is due next."""

    def pending_ids(self) -> frozenset[int]:
        """Return the notifications that are to be sent."""

    def next_of(self, uid: int, now: datetime) -> Notification | None:
        """Return the first notification of a user that is due, or None."""

    def new_of(self, uid: int, most: int) -> tuple[Sequence[str], int]:
        """Return the titles of the first new notifications of a user, and how many there are."""

    def replace_new(self, message: Message, at: datetime) -> None:
        """Store a message in place of the new notifications of a user."""

    def settle(
        self, sent: Notification, next_at: datetime | None, error: str | None, failure: Event | None
    ) -> None:
        """Store the result of an attempt, and a failure in the history of the job."""

    def delete_old(self, now: datetime) -> None:
        """Delete what was sent or given up some days ago."""


class NotificationDelivery:
    """The task that sends notifications."""

    def __init__(
        self,
        records: Records,
        sender: Sender,
        clock: Clock,
        in_writer: InThread,
        pauses: Sequence[timedelta] = PAUSES,
    ) -> None:
        self._records = records
        self._sender = sender
        self._clock = clock
        self._in_writer = in_writer
        self._pauses = pauses
        self._awake = asyncio.Event()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._budgets: dict[int, MessageBudget] = {}
        self._failures = LogOnce(_log)
        self.sent = 0
        """Messages that all receivers have."""
        self.given_up = 0

    def wake(self) -> None:
        """Look for new notifications soon."""
        self._awake.set()

    async def run(self) -> None:
        """Send what is due, without end."""
        await self._sender.clean(await self._until_written(self._records.pending_ids))
        try:
            while True:
                self._awake.clear()
                await self._look()
        finally:
            for task in self._serving.values():
                task.cancel()
            await asyncio.gather(*self._serving.values(), return_exceptions=True)

    async def _look(self) -> None:
        """Serve the users with due messages, and wait for more."""
        due = await self._until_written(self._records.pending_users)
        now = self._clock.now()
        for uid, at in due.items():
            if at <= now and uid not in self._serving:
                self._serving[uid] = asyncio.create_task(self._serve(uid), name=f"notify {uid}")
        later = [at for uid, at in due.items() if uid not in self._serving]
        wait_s = (min(later) - now).total_seconds() if later else None
        try:
            async with asyncio.timeout(wait_s):
                await self._awake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_GATHER_S)

    async def _serve(self, uid: int) -> None:
        """Send the due messages of a user, one after another."""
        try:
            while (due := await self._next(uid)) is not None:
                while (delivery := await self._send(due)) is None:
                    await asyncio.sleep(_TRY_AGAIN_S)
                await self._settle(due, delivery)
        except Exception as error:  # noqa: BLE001  it must not end the messages of others
            self._failures.say("serve", "cannot send notifications", why=repr(error), bug=error)
            await asyncio.sleep(_TRY_AGAIN_S)
        finally:
            del self._serving[uid]
            self.wake()

    async def _send(self, due: Notification) -> Delivery | None:
        async with self._slots:
            sending = asyncio.create_task(self._sender.send(due))
            try:
                await asyncio.wait({sending}, timeout=_HELD_FOR_S)
            except asyncio.CancelledError:
                sending.cancel()
                raise
        return await sending

    async def _next(self, uid: int) -> Notification | None:
        """Return the next message to a user, which may stand for many; None: none is due."""
        due = await self._until_written(lambda: self._records.next_of(uid, self._clock.now()))
        if due is None or due.attempts:
            return due
        budget = self._budgets.setdefault(uid, MessageBudget())
        if budget.takes_one(self._clock.steady()):
            return due
        await asyncio.sleep(budget.wait(self._clock.steady()).total_seconds())
        due = await self._until_written(lambda: self._collect(uid))
        budget.note_collected(self._clock.steady())
        return due

    def _collect(self, uid: int) -> Notification | None:
        """Store one message for the new ones, and return the next; in the thread that writes.

        In one call: what is stored between counting and replacing would be lost.
        """
        now = self._clock.now()
        titles, number = self._records.new_of(uid, LISTED)
        if number > 1:
            self._records.replace_new(collected(uid, titles, number), now)
        return self._records.next_of(uid, now)

    async def _settle(self, sent: Notification, delivery: Delivery) -> None:
        error, job = delivery.error, sent.message.job
        is_last = delivery.is_final or sent.attempts >= len(self._pauses)
        next_at, failure = None, None
        if error is not None and is_last:
            text = one_line(f"cannot notify of {sent.message.event}: {error}")
            failure = Event(self._clock.now(), "notify_failed", text)
            about = "" if job is None else f"job {job}: "
            self._failures.say(sent.message.uid, f"{about}{text}", why=error)
        elif error is not None:
            next_at = self._clock.now() + self._pauses[sent.attempts]
        await self._until_written(lambda: self._records.settle(sent, next_at, error, failure))
        if error is None:
            self.sent += 1
            self._failures.passed(sent.message.uid)
        elif next_at is None:
            self.given_up += 1
        if next_at is None:
            await self._sender.forget(sent.id)

    async def _until_written(self, call: Callable[[], T]) -> T:
        """Return the result of a call that needs the database, as soon as it can be written."""
        while True:
            try:
                return await self._in_writer(call)
            except RecordUnwritable as error:
                _log.debug("%s; notifications wait", error.message)
                await asyncio.sleep(_TRY_AGAIN_S)

    async def delete_old(self) -> None:
        """Delete what was sent or given up some days ago."""
        now = self._clock.now()
        await self._until_written(lambda: self._records.delete_old(now))
