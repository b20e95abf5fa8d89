"""Sends notifications by a small program, which runs as their user below a shim like a job.

The daemon passes the message on, and neither reads the user's file nor contacts a receiver. A
record allows one launch only in each directory, one for each attempt: so after a restart the daemon
finds the attempts that an earlier one began.
"""

import asyncio
import contextlib
import itertools
import os
import pwd
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec

from gpulease.domain.job import one_line
from gpulease.domain.notifications import Message, Notification
from gpulease.errors import GpuleaseError, LaunchDeferred, RecordUnwritable, TooMany
from gpulease.host import shim_control
from gpulease.host.launcher import AlreadyLaunched, Launch, Launcher, UserIdentity
from gpulease.service.notification_delivery import Delivery
from gpulease.wire.notifications import (
    END,
    MODULE,
    VARIABLE,
    NotificationOrder,
    NotifyTestView,
    ReceiverView,
)

SENDS_WITHIN: Final = timedelta(seconds=25)
"""For all receivers: a mail server may delay a sender on purpose, but rarely for longer."""
_ENDS_AFTER: Final = timedelta(seconds=5)
"""Later the shim ends the program with all that it has started."""
_GRACE: Final = timedelta(seconds=1)
_MOST_OUTPUT = 256 << 10
_MOST_RECEIVERS = 32
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_NOT_KNOWN = ReceiverView("", error="the program that sends it did not report to its end")
Details = Callable[[Message], Awaitable[tuple[str, bool] | None]]
"""Returns what to add to a message about the end of a job, and whether the job has failed."""
_ONE_TEST = "cannot send a test: another test of yours is not over"


class NotificationSender:
    """Starts the program for one attempt at a time, and reads what it reports."""

    def __init__(
        self,
        launcher: Launcher,
        directory: Path,
        environment: Mapping[str, str],
        *,
        as_other_users: bool,
        within: timedelta = SENDS_WITHIN,
        details: Details | None = None,
    ) -> None:
        """`directory` is for those of the attempts. `environment` is that of the daemon."""
        self._details = details
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
        return _delivery(results)

    async def test(self, message: Message) -> NotifyTestView:
        """Send a message that is not on record, and return what happened at each receiver.

        Raises:
            TooMany: another test of this user is running; receivers may hang.
        """
        if message.uid in self._testing:
            raise TooMany(_ONE_TEST, f"wait {self._within.total_seconds():.0f} seconds")
        self._testing.add(message.uid)
        try:
            return await self._test(message)
        finally:
            self._testing.remove(message.uid)

    async def _test(self, message: Message) -> NotifyTestView:
        directory = self._directory / f"test.{next(self._tests)}"
        order = self._order(message, ())
        order.verbose = True
        try:
            results = await self._attempt(message.uid, directory, order)
        except GpuleaseError as error:
            results = [ReceiverView("", error=error.message, hint=error.hint)]
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, True)
        return NotifyTestView(list(results))

    async def clean(self, pending: frozenset[int]) -> None:
        """Remove what is left of all notifications but these."""
        await asyncio.to_thread(self._remove_but, pending)

    async def forget(self, notification: int) -> None:
        """Remove what is left of a notification."""
        await asyncio.to_thread(self._remove, notification)

    def _order(self, message: Message, done: Sequence[str]) -> NotificationOrder:
        about = message.event, message.title, message.body
        return NotificationOrder(
            *about, self._within.total_seconds(), job=message.job, done=list(done)
        )

    def _of(self, notification: int, attempt: int) -> Path:
        return self._directory / f"{notification}.{attempt}"

    def _remove_but(self, pending: frozenset[int]) -> None:
        with contextlib.suppress(FileNotFoundError):
            for each in list(self._directory.iterdir()):
                number = each.name.partition(".")[0]
                if not (number.isdecimal() and int(number) in pending):
                    shutil.rmtree(each, ignore_errors=True)

    def _remove(self, notification: int) -> None:
        for attempt in itertools.count():
            if not self._of(notification, attempt).exists():
                return
            shutil.rmtree(self._of(notification, attempt), ignore_errors=True)

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
            async for _ in events:
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
        identity = UserIdentity(uid, user.pw_gid, user.pw_name, None)
        return Launch(
            job=0,
            directory=directory,
            argv=(sys.executable, "-P", "-s", "-B", "-X", "utf8", "-m", MODULE),
            cwd="/",
            environment=self._variables(user, order),
            identity=identity if self._as_other_users else None,
            umask=0o077,
            soft_limits={},
            stdin=False,
            awaits_attach=False,
            time_limit=self._within + _ENDS_AFTER,
            grace=_GRACE,
            log_limit=_MOST_OUTPUT,
            is_job=False,
        )

    def _variables(self, user: pwd.struct_passwd, order: NotificationOrder) -> dict[str, str]:
        """Return the environment of the program: nothing of the job's, which may have ended."""
        passed = [*_PROXIES]
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
    return list(_decoded(lines[:_MOST_RECEIVERS])), END in lines


def _decoded(lines: Sequence[bytes]) -> Iterator[ReceiverView]:
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            yield msgspec.json.decode(line, type=ReceiverView)


def _delivery(results: Sequence[ReceiverView]) -> Delivery:
    failed = [each for each in results if each.error is not None]
    errors = [f"{each.name}: {each.error}" if each.name else str(each.error) for each in failed]
    is_final = bool(failed) and all(each.is_final for each in failed)
    return Delivery(one_line("; ".join(errors)) or None, is_final=is_final)
