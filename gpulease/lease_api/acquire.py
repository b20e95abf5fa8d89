"""From the arguments of `gpulease.lease` to a granted lease, also while the daemon restarts."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from gpulease import config, user_daemon
from gpulease.client import Client, answers, machine_daemon, trusted_users
from gpulease.cluster_choice import SLURM, cluster
from gpulease.drawing.words import why_and_when
from gpulease.errors import BadValue, GpuleaseError, NoDaemon, NoRoomNow, TooMany
from gpulease.options import OPTIONS, option_of, read_fields
from gpulease.wire.jobs import EnvironmentView, JobView
from gpulease.wire.requests import ClaimRequest, HoldRequest, WorkerOptionsRequest, spoken, to_wire

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

_log = logging.getLogger("gpulease")

RECONNECT_EVERY = 1.0
"""Seconds between attempts to reach a daemon that restarts."""
POLL_EVERY = 10.0
"""Seconds between requests where the user has too many streams for another `watch`."""
LOG_AFTER = 1.0
"""Seconds in the queue before the log says so: most leases are granted at once."""
LOG_EVERY = 30.0
_LONGER = "wait=None waits without limit, wait='30m' waits for half an hour"
_ARGUMENTS = {each.long: f"{each.python}=" for each in OPTIONS.values() if each.python}
"""By the names of options."""
_OPTION = re.compile(r"--[a-z]+(?:-[a-z]+)*")
_SETTLED = ("active", "releasing", "ended")


@contextmanager
def granted(client: Client, request: HoldRequest) -> Iterator[tuple[JobView, EnvironmentView]]:
    """Queue a lease and yield it once it is granted, with its environment.

    An exception in the wait or in the block, such as Ctrl-C, releases the lease.

    Raises:
        NoRoomNow: it was not granted within the time to wait.
        GpuleaseError: it can never be granted, or was cancelled.
    """
    job = _queued(client, request)
    try:
        job = _until_granted(client, job)
        while True:
            with suppress(NoDaemon, TooMany):
                view = client.environment(job.id)
                break
            time.sleep(RECONNECT_EVERY)
        yield job, view
    except BaseException:
        _cancel(client, job)
        raise


def _queued(client: Client, request: HoldRequest) -> JobView:
    """Queue the lease in a thread, so that a Ctrl-C before the answer can still cancel it."""
    with ThreadPoolExecutor(1, "gpulease") as thread:
        answer = thread.submit(client.hold, request)
        try:
            return answer.result()
        except NoRoomNow as error:
            raise NoRoomNow(error.message, _LONGER) from None
        except GpuleaseError as error:
            raise with_python_names(error) from None
        except KeyboardInterrupt:
            answer.add_done_callback(
                lambda late: None if late.exception() else _cancel(client, late.result())
            )
            raise


def with_python_names(error: GpuleaseError) -> GpuleaseError:
    """Name arguments in an error, where it names options of the command."""

    if error.parts is not None:
        option = option_of(error.parts[0])
        error = error.called(_ARGUMENTS.get(option, option))

    def renamed(text: str) -> str:
        return _OPTION.sub(lambda found: _ARGUMENTS.get(found[0], found[0]), text)

    return type(error)(renamed(error.message), renamed(error.hint) if error.hint else None)


def _cancel(client: Client, job: JobView) -> None:
    with suppress(GpuleaseError):
        client.cancel(job.id)


def _until_granted(client: Client, job: JobView) -> JobView:
    views = _watch(client, job.id)
    with _WaitLog() as log:
        while job.state not in _SETTLED:
            job = next(views)
            log.update(job)
    if job.state == "active":
        return job
    why = job.reason or spoken(job.outcome or "it has ended")
    if job.outcome == "gave_up":
        raise NoRoomNow(f"cannot lease now: {why}", _LONGER)
    raise GpuleaseError(f"cannot lease: job {job.id} was never granted: {why}", job.hint)


def _watch(client: Client, number: int) -> Iterator[JobView]:
    """Yield the lease at each change, without end."""
    while True:
        try:
            yield from client.watch(number)
        except NoDaemon:
            _log.debug(
                "no daemon answers on %s; job %s keeps its place in the queue", client.path, number
            )
            time.sleep(RECONNECT_EVERY)
        except TooMany as error:
            _log.debug("%s; job %s keeps its place in the queue", error.message, number)
            with suppress(NoDaemon, TooMany):
                yield client.job(number)
            time.sleep(POLL_EVERY)


class _WaitLog:
    """Logs why the lease waits: to the logger `gpulease`, by default on stderr.

    What changes is logged every `LOG_EVERY`, but the first prediction of a start at once.
    """

    def __init__(self) -> None:
        self._text = ""
        self._has_start = self._logged_start = False
        self._logged: str | None = None
        self._logged_at = 0.0
        self._timer = threading.Timer(LOG_AFTER, self._write)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def update(self, job: JobView) -> None:
        place = f", number {job.position} in the queue" if job.position else ""
        now = datetime.now().astimezone()
        self._text = f"job {job.id} waits{place}{why_and_when(job, now)}"
        self._has_start = job.expected_start is not None
        changed = self._logged is not None and self._text != self._logged
        is_due = time.monotonic() - self._logged_at >= LOG_EVERY
        is_first = self._has_start and not self._logged_start
        if job.state == "queued" and changed and (is_due or is_first):
            self._write()

    def _write(self) -> None:
        self._logged, self._logged_at = self._text, time.monotonic()
        self._logged_start = self._has_start
        _log.warning("gpulease: %s", self._text)


Span = float | str | timedelta
"""Seconds, or "30m", or a timedelta."""
Visible = Literal["uuid", "index"]


GpuNames = int | str | Sequence[int | str]
"""GPUs by index, UUID or the beginning of a UUID: 1, "1,3", [1, 3], "GPU-5f3a"."""


def requested(**arguments: object) -> tuple[ClaimRequest, WorkerOptionsRequest, dict[str, Any]]:
    """Return the claim, the options for frameworks and the other fields that arguments ask for.

    Args:
        arguments: of `gpulease.lease`, by their names.

    Raises:
        BadValue: one of them cannot be read.
    """
    if arguments["gpu"] in ([], ()):  # a list that came out empty means no GPU, not any
        raise BadValue("cannot use gpu=: a GPU is missing", "leave out gpu= for any GPU")
    values = {
        name: arguments[option.python]
        for name, option in OPTIONS.items()
        if option.python in arguments
    }
    try:
        fields = read_fields(values)
    except BadValue as error:
        raise with_python_names(error) from None
    claim = fields["claim"]
    if claim["gpus"] is None:
        claim["gpus"] = len(claim["named"]) or 1
    return ClaimRequest(**claim), WorkerOptionsRequest(**fields["options"]), fields.get("", {})


def environment_on_wire() -> dict[str, str]:
    """Return the variables of this process as requests have them."""
    return {to_wire(key): to_wire(value) for key, value in config.environment().items()}


def connect() -> Client:
    """Return a client of the first daemon that answers, starting one if there is none.

    A daemon that GPULEASE_SOCKET names is not checked here: requests fail if it does not answer.

    Raises:
        NoDaemon: the machine's daemon does not come back, or none can be started, as on a machine
            of a cluster without one.
    """
    *system, own = config.candidate_sockets(None)
    if not system:
        return Client(own, trusted=trusted_users())
    state = config.personal_settings().state
    found = machine_daemon(_log.warning) or user_daemon.answering(own, state, answers)
    if found is None:
        if cluster(config.environment()) == SLURM:
            raise NoDaemon(
                "cannot lease: no gpuleased runs on this machine, which uses the GPUs of a Slurm "
                "cluster",
                "run the program as a job: gpulease run python ...; for GPUs of this machine, set "
                "GPULEASE_CLUSTER=none",
            )
        found, started = user_daemon.ensure(own, state, answers, user_daemon.daemon_command())
        if started:
            _log.warning("gpulease: no daemon was running; started one for you (socket %s)", found)
    return Client(found, trusted=trusted_users())
