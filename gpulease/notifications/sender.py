"""Sends the notifications that are on record, and stores how that went.

Each user has at most one message at a time on the way. A receiver may hang until its deadline: it
delays other messages of its user alone.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import pwd
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gpulease.domain.job import Invocation, one_line
from gpulease.domain.notifications import (
    LISTED,
    LONGEST_BODY,
    Message,
    Notification,
    NotifyEvent,
)
from gpulease.errors import GpuleaseError, LaunchDeferred, RecordUnwritable, TooMany
from gpulease.host import shim_control
from gpulease.host.launch import Launch
from gpulease.host.launcher import AlreadyLaunched, Launcher
from gpulease.notifications.outbox import Outbox
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import Clock, Event, InThread
from gpulease.shim.launch_request import IdentitySpec, ShimSpec
from gpulease.wire.notifications import (
    END,
    MODULE,
    VARIABLE,
    NotificationOrder,
    NotifyTestView,
    ReceiverView,
)

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
SENDS_WITHIN: Final = timedelta(seconds=25)
"""For all receivers: a mail server may delay a sender on purpose, but rarely for longer."""
_ENDS_AFTER: Final = timedelta(seconds=5)
"""Later the shim ends the program with all that it has started."""
_GRACE: Final = timedelta(seconds=1)
_LONGEST_QUIET = timedelta(days=1)
_MOST_OUTPUT = 256 << 10
_MOST_RECEIVERS = 32
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_NOT_KNOWN = ReceiverView("", error="the program that sends it did not report to its end")
Details = Callable[[Message], Awaitable[tuple[str, bool] | None]]
"""Returns what to add to a message about the end of a job, and whether the job has failed."""
_ONE_TEST = "cannot send a test: another test of yours is not over"
_REACHED = "Notifications reach you."


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one attempt to send a message went."""

    error: str | None = None
    """Why not all receivers have it, in one line without secrets; None: they have."""
    is_final: bool = False
    """Another attempt would fail in the same way."""
    quiet_until: datetime | None = None
    """When the user wants it, by their quiet hours."""


class Program:
    """Sends messages by a small program, which runs as their user below a shim like a job.

    The daemon passes the message on, and neither reads the user's file nor contacts a receiver. A
    record allows one launch only in each directory, one for each attempt: so after a restart the
    daemon finds the attempts that an earlier one began.
    """

    def __init__(
        self,
        launcher: Launcher,
        directory: Path,
        environment: Mapping[str, str],
        *,
        as_other_users: bool,
        within: timedelta = SENDS_WITHIN,
        details: Details | None = None,
        address: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`directory` is for those of the attempts. `environment` is that of the daemon.

        `address` returns that of the web page.
        """
        self._details = details
        self._address = address
        self._launcher = launcher
        self._directory = directory
        self._environment = environment
        self._as_other_users = as_other_users
        self._within = within
        self._tests = itertools.count(1)
        self._testing: set[int] = set()

    async def send(self, sent: Notification) -> Delivery | None:
        """Make one attempt, at most once for each number of attempts.

        None: nothing could be started now.
        """
        directories = [self._of(sent.id, attempt) for attempt in range(sent.attempts + 1)]
        reports = [await asyncio.to_thread(_read, each) for each in directories[:-1]]
        earlier = [each for results, _ in reports for each in results]
        done = [each.key for each in earlier if each.error is None and each.key]
        order = self._order(sent.message, done)
        try:
            more = None if self._details is None else await self._details(sent.message)
            if more is not None:
                order.details, order.failed = more
            results = await self._attempt(sent.message.uid, directories[-1], order)
        except (RecordUnwritable, LaunchDeferred):
            return None
        except GpuleaseError as error:
            return Delivery(one_line(error.message), is_final=True)
        if results and (until := results[0].quiet_until) is not None:
            # It was no attempt, and the next one needs the directory.
            await asyncio.to_thread(shutil.rmtree, directories[-1], True)
            return Delivery("quiet hours", quiet_until=until)
        failed = [each for each in results if each.error is not None]
        errors = [f"{each.name}: {each.error}" if each.name else str(each.error) for each in failed]
        is_final = bool(failed) and all(each.is_final for each in failed)
        return Delivery(one_line("; ".join(errors)) or None, is_final=is_final)

    async def test(self, uid: int) -> NotifyTestView:
        """Send a user a message that is not on record, and return what happened at each receiver.

        Raises:
            TooMany: another test of this user is running; receivers may hang.
        """
        if uid in self._testing:
            raise TooMany(_ONE_TEST, f"wait {self._within.total_seconds():.0f} seconds")
        self._testing.add(uid)
        directory = self._directory / f"test.{next(self._tests)}"
        message = Message(uid, NotifyEvent.TEST, "test of gpulease notify", _REACHED)
        order = self._order(message, ())
        order.verbose = True
        try:
            results = await self._attempt(uid, directory, order)
        except GpuleaseError as error:
            results = [ReceiverView("", error=error.message, hint=error.hint)]
        finally:
            self._testing.remove(uid)
            await asyncio.to_thread(shutil.rmtree, directory, True)
        return NotifyTestView(list(results))

    async def clean(self, pending: frozenset[int]) -> None:
        """Remove what is left of all notifications but these."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                for each in list(self._directory.iterdir()):
                    number = each.name.partition(".")[0]
                    if not (number.isdecimal() and int(number) in pending):
                        shutil.rmtree(each, ignore_errors=True)

        await asyncio.to_thread(remove)

    async def forget(self, notification: int) -> None:
        """Remove what is left of a notification."""

        def remove() -> None:
            for each in list(self._directory.glob(f"{notification}.*")):
                shutil.rmtree(each, ignore_errors=True)

        await asyncio.to_thread(remove)

    def _order(self, message: Message, done: Sequence[str]) -> NotificationOrder:
        about = message.event, message.title, message.body
        page = None if message.job is None else self._address()
        return NotificationOrder(
            *about, self._within.total_seconds(), job=message.job, done=list(done),
            link="" if page is None else f"{page}/jobs/{message.job}",
        )  # fmt: skip

    def _of(self, notification: int, attempt: int) -> Path:
        return self._directory / f"{notification}.{attempt}"

    async def _attempt(
        self, uid: int, directory: Path, order: NotificationOrder
    ) -> Sequence[ReceiverView]:
        """Run the program to its end, and return its results.

        Raises:
            RecordUnwritable, LaunchDeferred: nothing was started.
            GpuleaseError: the program cannot be started.
        """
        launch = await asyncio.to_thread(self._launch, uid, directory, order)
        with contextlib.suppress(AlreadyLaunched):  # by an earlier daemon
            await self._launcher.launch(launch)
        async with contextlib.aclosing(shim_control.follow(directory)) as events:
            async for _ in events:  # the last one is the end of all that it has started
                pass
        results, is_whole = await asyncio.to_thread(_read, directory)
        return results if is_whole else [*results, _NOT_KNOWN]

    def _launch(self, uid: int, directory: Path, order: NotificationOrder) -> Launch:
        """Make the directory, and return what to start; asks the user database, which may hang."""
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            raise GpuleaseError(
                f"no user has the id {uid}, so there is no home to look in"
            ) from None
        _make(self._directory)
        _make(directory)
        identity = IdentitySpec(uid, user.pw_gid, user.pw_name, None)
        return Launch(
            ShimSpec(
                job=0,
                directory=str(directory),
                identity=identity if self._as_other_users else None,
                stdin=False,
                awaits_attach=False,
                time_limit_s=(self._within + _ENDS_AFTER).total_seconds(),
                grace_s=_GRACE.total_seconds(),
                log_limit=_MOST_OUTPUT,
            ),
            Invocation(
                # No modules of the user's: neither of the working directory (-P) nor of ~/.local
                # (-s).
                argv=(sys.executable, "-P", "-s", "-B", "-X", "utf8", "-m", MODULE),
                cwd="/",
                environment=self._variables(user, order),
                umask=0o077,
            ),
        )

    def _variables(self, user: pwd.struct_passwd, order: NotificationOrder) -> dict[str, str]:
        """Return the environment of the program: nothing of the job's, which may have ended."""
        passed = [*_PROXIES, "TZ"]  # quiet hours are in the time of the messages
        if user.pw_uid == os.geteuid():
            # Of the daemon's own user, who may have started it.
            passed += ["HOME", "XDG_CONFIG_HOME"]
        known = {name: self._environment[name] for name in passed if name in self._environment}
        return {
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "PATH": _PATH,
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(Path(__file__).parents[2]),  # it keeps it from what it runs
            **known,
            VARIABLE: msgspec.json.encode(order).decode(),
        }


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RecordUnwritable(f"cannot create {directory}: {error.strerror}") from error


def _read(directory: Path) -> tuple[Sequence[ReceiverView], bool]:
    """Return what the program has reported, and whether that is all.

    It runs as the user, who may report anything. On a full disk, some of it is missing.
    """
    try:
        with (directory / "stdout").open("rb") as file:
            lines = file.read(_MOST_OUTPUT).splitlines()
    except OSError:
        return [], False
    results = []
    for line in lines[:_MOST_RECEIVERS]:
        with contextlib.suppress(msgspec.MsgspecError):
            results.append(msgspec.json.decode(line, type=ReceiverView))
    return results, END in lines


class Sending:
    """The task that sends notifications."""

    def __init__(
        self,
        outbox: Outbox,
        program: Program,
        clock: Clock,
        in_writer: InThread,
        pauses: Sequence[timedelta] = PAUSES,
        try_again_s: float = 5.0,
    ) -> None:
        """`try_again_s`: time after which something is tried that could not begin."""
        self._outbox = outbox
        self._program = program
        self._clock = clock
        self._in_writer = in_writer
        self._pauses = pauses
        self._try_again_s = try_again_s
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
        await self._program.clean(await self._until_written(self._outbox.pending_ids))
        try:
            while True:
                self._awake.clear()
                due = await self._until_written(self._outbox.pending_users)
                now = self._clock.now()
                for uid, at in due.items():
                    if at <= now and uid not in self._serving:
                        serving = asyncio.create_task(self._serve(uid), name=f"notify {uid}")
                        self._serving[uid] = serving
                later = [at for uid, at in due.items() if uid not in self._serving]
                wait_s = (min(later) - now).total_seconds() if later else None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._awake.wait()
                    await asyncio.sleep(_GATHER_S)
        finally:
            for task in self._serving.values():
                task.cancel()
            await asyncio.gather(*self._serving.values(), return_exceptions=True)

    async def _serve(self, uid: int) -> None:
        """Send the due messages of a user, one after another."""
        try:
            while (due := await self._next(uid)) is not None:
                while (delivery := await self._send(due)) is None:
                    await asyncio.sleep(self._try_again_s)
                await self._settle(due, delivery)
        except Exception as error:  # noqa: BLE001  it must not end the messages of others
            self._failures.say("serve", "cannot send notifications", why=repr(error), bug=error)
            await asyncio.sleep(self._try_again_s)
        finally:
            del self._serving[uid]
            self.wake()

    async def _send(self, due: Notification) -> Delivery | None:
        async with self._slots:
            # Not under a timeout, which would end the wait for a message that may yet arrive: only
            # its slot is given to another user.
            sending = asyncio.create_task(self._program.send(due))
            try:
                await asyncio.wait({sending}, timeout=_HELD_FOR_S)
            except asyncio.CancelledError:
                sending.cancel()
                raise
        return await sending

    async def _next(self, uid: int) -> Notification | None:
        """Return the next message to a user, which may stand for many; None: none is due."""
        due = await self._until_written(lambda: self._outbox.next_of(uid, self._clock.now()))
        if due is None or due.attempts:
            return due
        if due.message.event is NotifyEvent.DIGEST:
            return await self._until_written(lambda: self._collect(uid, digest=True))
        budget = self._budgets.setdefault(uid, MessageBudget())
        if budget.takes_one(self._clock.steady()):
            return due
        await asyncio.sleep(budget.wait(self._clock.steady()).total_seconds())
        due = await self._until_written(lambda: self._collect(uid, digest=False))
        budget.note_collected(self._clock.steady())
        return due

    def _collect(self, uid: int, *, digest: bool) -> Notification | None:
        """Replace the new messages of a user by one, and return the next message."""
        # In one call: what is stored between counting and replacing would be lost.
        now = self._clock.now()
        titles, number = self._outbox.new_of(uid, now, LISTED, digest=digest)
        if number > 1:
            message = collected(uid, titles, number, digest=digest)
            self._outbox.replace_new(message, now, digest=digest)
        return self._outbox.next_of(uid, now)

    async def _settle(self, sent: Notification, delivery: Delivery) -> None:
        error, job = delivery.error, sent.message.job
        is_last = delivery.is_final or sent.attempts >= len(self._pauses)
        next_at, failure = None, None
        if delivery.quiet_until is not None:
            # The user's program may report anything.
            next_at = min(delivery.quiet_until, self._clock.now() + _LONGEST_QUIET)
        elif error is not None and is_last:
            text = one_line(f"cannot notify of {sent.message.event}: {error}")
            failure = Event(self._clock.now(), "notify_failed", text)
            about = "" if job is None else f"job {job}: "
            self._failures.say(sent.message.uid, f"{about}{text}", why=error)
        elif error is not None:
            next_at = self._clock.now() + self._pauses[sent.attempts]
        attempts = sent.attempts + (delivery.quiet_until is None)
        await self._until_written(
            lambda: self._outbox.settle(sent, attempts, next_at, error, failure)
        )
        if error is None:
            self.sent += 1
            self._failures.passed(sent.message.uid)
        elif next_at is None:
            self.given_up += 1
        if next_at is None:
            await self._program.forget(sent.id)

    async def _until_written(self, call: Callable[[], T]) -> T:
        """Return the result of a call that needs the database, as soon as it can be written."""
        while True:
            try:
                return await self._in_writer(call)
            except RecordUnwritable as error:
                _log.debug("%s; notifications wait", error.message)
                await asyncio.sleep(self._try_again_s)

    async def delete_old(self) -> None:
        """Delete what was sent or given up some days ago."""
        now = self._clock.now()
        await self._until_written(lambda: self._outbox.delete_old(now))


def collected(uid: int, titles: Sequence[str], number: int, *, digest: bool = False) -> Message:
    """Return one message in place of `number` ones, of which `titles` are the first.

    `digest`: they are those of a day, which its owner wants together.
    """
    lines = list(titles[:LISTED])
    if number > len(lines):
        lines.append(f"and {number - len(lines)} more; gpulease history lists past jobs")
    body = "\n".join(lines)[:LONGEST_BODY]
    title = (
        f"{number} jobs have ended since the last digest"
        if digest
        else f"{number} notifications of jobs"
    )
    return Message(uid, NotifyEvent.COLLECTED, title, body)


BURST = 10
"""Messages to one user that are sent one by one, as for some jobs by hand; then they are collected.
Mail servers and chat services refuse senders of much more."""
QUIET_AFTER = timedelta(minutes=10)
"""Time after which a message no longer counts, and without collecting the pauses are short again.
"""
FIRST_PAUSE = timedelta(minutes=1)
LONGEST_PAUSE = timedelta(hours=1)


class MessageBudget:
    """Limits the messages to one user: a burst, then collected ones with growing pauses.

    The instants are those of a steady clock.
    """

    def __init__(self) -> None:
        self._sent: list[timedelta] = []
        self._pause = timedelta(0)
        self._not_before = timedelta(0)

    def takes_one(self, now: timedelta) -> bool:
        """Return whether a message may be sent alone, and count it."""
        self._sent = [at for at in self._sent if now - at < QUIET_AFTER]
        if len(self._sent) >= BURST:
            return False
        self._sent.append(now)
        return True

    def wait(self, now: timedelta) -> timedelta:
        """Return the time until the next collected message may be sent."""
        return max(timedelta(0), self._not_before - now)

    def note_collected(self, now: timedelta) -> None:
        """Count a collected message."""
        is_quiet = now - self._not_before > QUIET_AFTER
        self._pause = FIRST_PAUSE if is_quiet else min(2 * self._pause, LONGEST_PAUSE)
        self._pause = max(self._pause, FIRST_PAUSE)
        self._not_before = now + self._pause
