"""From the arguments of `gpulease.lease` to a granted lease, also while the daemon restarts."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Literal, Self, TypeVar

from gpulease import config, user_daemon
from gpulease.client import Client, answers, machine_daemon, trusted_users
from gpulease.cluster_choice import SLURM, cluster
from gpulease.errors import BadValue, GpuleaseError, NoDaemon, NoRoomNow, TooMany
from gpulease.units import Share, parse_memory, parse_size, parse_span, parse_split
from gpulease.wire.jobs import EnvironmentView, JobView
from gpulease.wire.requests import ClaimRequest, HoldRequest, WorkerOptionsRequest, spoken, to_wire

_log = logging.getLogger("gpulease")

RECONNECT_EVERY = 1.0
"""Seconds between attempts to reach a daemon that restarts."""
POLL_EVERY = 10.0
"""Seconds between requests where the user has too many streams for another `watch`."""
LOG_AFTER = 1.0
"""Seconds in the queue before the log says so: most leases are granted at once."""
LOG_EVERY = 30.0
_LONGER = "wait=None waits without limit, wait='30m' waits for half an hour"
_OPTION = re.compile(r"--(gpu-model|min-vram|same-model|gpus|gpu|time)\b(?!-)")
_SETTLED = ("active", "releasing", "ended")

Result = TypeVar("Result")


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
        yield job, _until_answered(lambda: client.environment(job.id))
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
            answer.add_done_callback(partial(_cancel_late, client))
            raise


def with_python_names(error: GpuleaseError) -> GpuleaseError:
    """Name arguments in the hint of an error of the daemon, which names options of the command."""

    def argument(found: re.Match[str]) -> str:
        return {"time": "time_limit"}.get(found[1], found[1]).replace("-", "_") + "="

    error.hint = _OPTION.sub(argument, error.hint) if error.hint else None
    return error


def _cancel_late(client: Client, answer: Future[JobView]) -> None:
    if answer.exception() is None:
        _cancel(client, answer.result())


def _cancel(client: Client, job: JobView) -> None:
    with suppress(GpuleaseError):
        client.cancel(job.id)


def _until_granted(client: Client, job: JobView) -> JobView:
    views = _watch(client, job.id)
    with _WaitLog() as log:
        while job.state not in _SETTLED:
            job = next(views)
            log.update(job)
    if job.state != "active":
        raise _not_granted(job)
    return job


def _not_granted(job: JobView) -> GpuleaseError:
    why = job.reason or spoken(job.outcome or "it has ended")
    if job.outcome == "gave_up":
        return NoRoomNow(f"cannot lease now: {why}", _LONGER)
    return GpuleaseError(f"cannot lease: job {job.id} was never granted: {why}", job.hint)


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


def _until_answered(ask: Callable[[], Result]) -> Result:
    while True:
        with suppress(NoDaemon, TooMany):
            return ask()
        time.sleep(RECONNECT_EVERY)


class _WaitLog:
    """Logs why the lease waits: to the logger `gpulease`, by default on stderr."""

    def __init__(self) -> None:
        self._text = ""
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
        self._text = f"job {job.id} waits{place}" + (f": {job.reason}" if job.reason else "")
        changed = self._logged is not None and self._text != self._logged
        if job.state == "queued" and changed and time.monotonic() - self._logged_at >= LOG_EVERY:
            self._write()

    def _write(self) -> None:
        self._logged, self._logged_at = self._text, time.monotonic()
        _log.warning("gpulease: %s", self._text)


Span = float | str | timedelta
"""Seconds, or "30m", or a timedelta."""
Visible = Literal["uuid", "index"]


GpuNames = int | str | Sequence[int | str]
"""GPUs by index, UUID or the beginning of a UUID: 1, "1,3", [1, 3], "GPU-5f3a"."""


def names_of(gpu: GpuNames | None) -> list[str]:
    """Return the names of GPUs, each once.

    Raises:
        BadValue: one is empty.
    """
    if gpu is None:
        return []
    given = [gpu] if isinstance(gpu, int | str) else gpu
    names = [name.strip() for each in given for name in str(each).split(",")]
    if not names or not all(names):
        raise BadValue(f"cannot use gpu={gpu!r}: a GPU is missing", "leave out gpu= for any GPU")
    return list(dict.fromkeys(names))


def claim_of(
    memory: str | int | None,
    gpus: int | None,
    exclusive: bool,
    time_limit: Span | None,
    *,
    named: Sequence[str] = (),
    model: str | None = None,
    min_vram: str | int | None = None,
    same_model: bool = False,
) -> ClaimRequest:
    """Return the claim; `memory` is bytes, "4G", "40%", or None for the default.

    Raises:
        BadValue: an argument is out of range.
    """
    gpus = len(named) or 1 if gpus is None else gpus
    if gpus < 1:
        raise BadValue(
            f"cannot lease {gpus} GPUs: a lease has at least one", "leave out gpus= for one"
        )
    asked = parse_memory(memory) if isinstance(memory, str) else _bytes(memory)
    return ClaimRequest(
        memory=None if isinstance(asked, Share) else asked,
        share=float(asked.percent) if isinstance(asked, Share) else None,
        gpus=gpus,
        exclusive=exclusive,
        time_limit=None if time_limit is None else _positive(time_limit),
        named=list(named),
        model=model,
        min_vram=parse_size(min_vram) if isinstance(min_vram, str) else _bytes(min_vram),
        same_model=same_model,
    )


def _bytes(memory: int | None) -> int | None:
    if memory is not None and memory < 2**20:
        raise BadValue(
            f"cannot lease {memory} bytes: a number is read as bytes",
            f'did you mean "{memory}G"?' if 0 < memory < 1024 else 'write a size as "4G"',
        )
    return memory


def seconds(span: Span) -> float:
    """Return a span in seconds, 0 or more.

    Raises:
        BadValue: it is not a span, or is negative.
    """
    if isinstance(span, str):
        return parse_span(span).total_seconds()
    amount = span.total_seconds() if isinstance(span, timedelta) else float(span)
    if not 0 <= amount < float("inf"):
        raise BadValue(
            f"cannot use the time {span!r}: it must be finite and not negative",
            'write seconds, "30m" or a timedelta; None means without limit',
        )
    return amount


def _positive(span: Span) -> float:
    if amount := seconds(span):
        return amount
    raise BadValue(f"cannot use the time {span!r}: it must be above zero")


def framework_options(
    visible: Visible, growth: bool, split: int | str, processes: int | None
) -> WorkerOptionsRequest:
    """Return the options for frameworks; `split` is a number of parts, or their sizes: "1G,2G".

    Raises:
        BadValue: `split` is neither, or `processes` is less than 1.
    """
    parts, sizes = parse_split(str(split))
    return WorkerOptionsRequest(
        visible=visible,
        growth=growth,
        split=parts,
        split_sizes=sizes,
        processes=_checked_processes(processes),
    )


def _checked_processes(count: int | None) -> int | None:
    if count is not None and count < 1:
        raise BadValue(f"cannot divide a lease between {count} processes: the least is 1")
    return count


def hold_request(
    claim: ClaimRequest,
    environment: Mapping[str, str],
    *,
    name: str | None,
    wait: Span | None,
    visible: Visible,
    growth: bool,
    split: int | str,
    processes: int | None,
) -> HoldRequest:
    """Return the request for a lease that this process holds.

    Raises:
        BadValue: an argument is out of range.
    """
    return HoldRequest(
        environment={to_wire(key): to_wire(value) for key, value in environment.items()},
        pid=os.getpid(),
        claim=claim,
        options=framework_options(visible, growth, split, processes),
        name=name,
        wait=None if wait is None else seconds(wait),
    )


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
        _refuse_on_cluster()
        found, started = user_daemon.ensure(own, state, answers, user_daemon.daemon_command())
        if started:
            _log.warning("gpulease: no daemon was running; started one for you (socket %s)", found)
    return Client(found, trusted=trusted_users())


def _refuse_on_cluster() -> None:
    if cluster(config.environment()) == SLURM:
        raise NoDaemon(
            "cannot lease: no gpuleased runs on this machine, which uses the GPUs of a Slurm "
            "cluster",
            "run the program as a job: gpulease run python ...; for GPUs of this machine, set "
            "GPULEASE_CLUSTER=none",
        )
