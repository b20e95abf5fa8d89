"""`gpulease.Executor`: an executor of concurrent.futures, in which each call is a job.

One thread submits the calls, one job each, and follows all of them: jobs write to a FIFO when they
start and end, and the daemon says which jobs have ended without that.
"""

import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, TypeVar

from gpulease import config
from gpulease.client import Client, submission
from gpulease.errors import (
    AlreadyLeased,
    BadValue,
    CallFailed,
    GpuleaseError,
    NoDaemon,
    NoSuchJob,
    TooMany,
)
from gpulease.lease_api.acquire import (
    GpuNames,
    Span,
    Visible,
    connect,
    environment_on_wire,
    requested,
    with_python_names,
)
from gpulease.lease_api.call_files import CallFiles, Outcome, name_of
from gpulease.options import seconds
from gpulease.wire.jobs import JobView
from gpulease.wire.requests import (
    LARGEST_RETRY,
    LONGEST_NAME,
    CancelJobsRequest,
    NestedRequest,
    QueueRequest,
    SubmitRequest,
    spoken,
    to_wire,
)

_log = logging.getLogger("gpulease")

ASK_EVERY = 2.0
"""Seconds between questions to the daemon, which jobs have ended without having said so."""
ENDS_WITHIN = 0.05
"""Seconds between questions about a job that has said so, until the daemon confirms it."""
_AT_ONCE = 20
"""Calls that are submitted before the thread looks for news again."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """A call, from its submission to its outcome."""

    number: int
    name: str
    future: "futures.Future[object]"
    request: SubmitRequest
    job: int = 0
    """The id of its job, once it has one."""
    over: bool = False
    """The call has ended, and its job is about to."""
    cancelled: bool = False
    """The daemon was asked to cancel its job."""
    _is_started: bool = False

    def start(self) -> bool:
        """Mark the future as running; return False if it was cancelled before."""
        if self._is_started:
            return self.future.running()
        self._is_started = True
        return self.future.set_running_or_notify_cancel()

    def settle(self, outcome: Outcome) -> None:
        """Give the future its outcome, unless it was cancelled."""
        if not self.start():
            return
        if outcome.error is not None:
            self.future.set_exception(outcome.error)
        else:
            self.future.set_result(outcome.value)


class Executor(futures.Executor):
    """Runs each call as a job with a lease, in a new process of this Python.

    At the end of a `with` block it waits for all calls. Ctrl-C cancels them, and they end with this
    process in any case.
    """

    def __init__(  # noqa: PLR0913  each is part of the public API
        self,
        memory: str | int,
        *,
        gpus: int | None = None,
        gpu: GpuNames | None = None,
        gpu_model: str | None = None,
        min_vram: str | int | None = None,
        same_model: bool = False,
        linked: bool = False,
        exclusive: bool = False,
        ram: str | int | None = None,
        cpus: int | None = None,
        time_limit: Span | None = None,
        name: str | None = None,
        max_workers: int | None = None,
        retry_oom: float | None = None,
        retries: int = 0,
        retry_on: Sequence[int] = (),
        retry_delay: Span | None = None,
        visible: Visible = "uuid",
        growth: bool = False,
        split: int | str = 1,
        processes: int | None = None,
        new_lease: bool = False,
        client: Client | None = None,
    ) -> None:
        """Describe the lease of each call; the arguments are those of `gpulease.lease`.

        `name` is that of the jobs, by default the function's. At most `max_workers` jobs are queued
        or running at once; None: all calls. `retry_oom=1.5` runs a call that ran out of GPU memory
        again with 1.5 times as much. `retries=3` runs a call again that raised or crashed, up to
        three times, the first time after `retry_delay` (10 s), which is doubled each time; with
        `retry_on` only after these exit codes of its process. Inside a lease, `new_lease=True` is
        needed.

        Raises:
            AlreadyLeased: this process runs within a lease, and `new_lease` is not given.
            GpuleaseError: no daemon answers and none can be started, or TMPDIR cannot be used.
            BadValue: an argument cannot be read.
        """
        if max_workers is not None and max_workers < 1:
            raise BadValue(f"cannot use max_workers={max_workers}: it must be at least 1")
        if retry_oom is not None and not 1 < retry_oom <= LARGEST_RETRY:
            raise BadValue(
                f"cannot use retry_oom={retry_oom:g}: it must be above 1 and at most "
                f"{LARGEST_RETRY:g}"
            )
        self._claim, self._options, _ = requested(
            memory=memory, gpus=gpus, gpu=gpu, gpu_model=gpu_model, min_vram=min_vram,
            same_model=same_model, linked=linked, exclusive=exclusive, ram=ram, cpus=cpus,
            time_limit=time_limit, visible=visible, growth=growth, split=split,
            processes=processes,
        )  # fmt: skip
        delay = seconds(retry_delay)
        self._queue = QueueRequest(retries=retries, retry_on=list(retry_on), retry_delay=delay)
        self._name, self._retry_oom, self._max = name, retry_oom, max_workers or sys.maxsize
        self._client = client or connect()
        if not new_lease:
            _refuse_inside_a_lease(self._client)
        self._umask, self._limits = submission.umask(), submission.soft_limits()
        self._files = CallFiles()
        self._numbers = itertools.count(1)
        self._waiting: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        """By number; only the thread uses it."""
        self._lock = threading.Lock()
        self._is_shut, self._is_stopped, self._is_ended = False, False, False
        self._ask_at = 0.0
        self._thread = threading.Thread(target=self._run, name="gpulease-executor")
        self._thread.start()

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> "futures.Future[T]":
        """Queue a job that calls `fn(*args, **kwargs)`, and return the future of its result.

        The future is running once the job has started. An exception of the call is raised with the
        traceback in the job as its cause.

        Raises:
            BadValue: the call cannot be pickled.
            GpuleaseError: the call cannot be written to TMPDIR.
            RuntimeError: the executor was shut down, or belongs to the parent of this process.
        """
        number, future = next(self._numbers), futures.Future[T]()
        self._refuse_if_shut()
        self._files.write(number, fn, (args, kwargs))
        name = self._name or name_of(fn)[:LONGEST_NAME]
        call = _Call(number, name, future, self._request(number, name))  # type: ignore[arg-type]
        with self._lock:
            self._refuse_if_shut()
            self._waiting.append(call)
        future.add_done_callback(lambda it: self._files.wake() if it.cancelled() else None)
        self._files.wake()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; with `cancel_futures`, cancel those that have not started."""
        if os.getpid() != self._files.pid:
            return
        with self._lock:
            self._is_shut = True
            self._is_stopped = self._is_stopped or cancel_futures
        if self._thread.is_alive():
            self._files.wake()
        if wait:
            try:
                self._thread.join()
            except KeyboardInterrupt:
                self._end_calls()
                raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._end_calls()
        self.shutdown(wait=True)

    # In the thread of the caller.

    def _refuse_if_shut(self) -> None:
        if os.getpid() != self._files.pid:
            raise RuntimeError("cannot submit to an executor of the parent process")
        if self._is_shut:
            raise RuntimeError("cannot submit to an executor after its shutdown")

    def _request(self, number: int, name: str) -> SubmitRequest:
        return SubmitRequest(
            argv=[to_wire(word) for word in self._files.command(number)],
            cwd=to_wire(os.getcwd()),  # noqa: PTH109  Path.cwd() is the same
            environment=environment_on_wire(),
            umask=self._umask,
            soft_limits=self._limits,
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            claim=self._claim,
            options=self._options,
            name=name,
            # The same if the answer is lost and the thread submits it again.
            key=os.urandom(16).hex(),
            queue=self._queue,
            retry_oom=self._retry_oom,
        )

    def _end_calls(self) -> None:
        """Cancel all calls, also those that have started."""
        self._is_ended = True
        self.shutdown(wait=False, cancel_futures=True)

    # In the thread of the executor.

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    takes_more = not self._is_shut and threading.main_thread().is_alive()
                    if not (takes_more or self._waiting or self._running):
                        break
                pause = self._submit_some()
                for kind, number in self._files.news(pause):
                    call = self._running.get(number)
                    if call is not None and kind == "started":
                        call.start()
                    elif call is not None:
                        call.over = True
                self._cancel_unwanted()
                self._collect()
        except Exception as error:
            for call in (*self._waiting, *self._running.values()):
                call.settle(Outcome(error=futures.BrokenExecutor(str(error))))
            raise
        finally:
            self._is_shut = True
            self._files.remove()

    def _submit_some(self) -> float:
        """Submit calls that wait, and return for how many seconds to wait for news then."""
        for _ in range(_AT_ONCE):
            if not self._waiting or len(self._running) >= self._max:
                break
            call = self._waiting.popleft()
            if not self._submit(call):
                self._waiting.appendleft(call)
                break
        else:
            return 0.0
        return ENDS_WITHIN if any(call.over for call in self._running.values()) else ASK_EVERY

    def _submit(self, call: _Call) -> bool:
        """Submit a call; return whether that is settled."""
        if self._is_stopped:
            call.future.cancel()
        if call.future.cancelled():
            self._settle(call, Outcome())
            return True
        try:
            call.job = self._client.submit(call.request).id
        except (NoDaemon, TooMany) as error:
            _log.debug("%s; the call of %s is submitted later", error.message, call.name)
            return False
        except GpuleaseError as error:
            self._settle(call, Outcome(error=with_python_names(error)))
        else:
            self._running[call.number] = call
        return True

    def _cancel_unwanted(self) -> None:
        calls = self._running.values()
        if self._is_stopped:
            for call in calls:
                call.future.cancel()
        unwanted = [
            call
            for call in calls
            if not call.cancelled and (self._is_ended or call.future.cancelled())
        ]
        if unwanted:
            with suppress(NoDaemon, TooMany):
                self._client.cancel_all(CancelJobsRequest(jobs=[call.job for call in unwanted]))
                for call in unwanted:
                    call.cancelled = True

    def _collect(self) -> None:
        """Settle the calls that have ended, as the daemon says."""
        is_time = time.monotonic() >= self._ask_at
        asked = [call for call in self._running.values() if is_time or call.over or call.cancelled]
        if is_time:
            self._ask_at = time.monotonic() + ASK_EVERY
        if not asked:
            return
        by_job = {call.job: call for call in asked}
        try:
            for job in self._client.ends(list(by_job), timeout=0):
                self._end(by_job.pop(job.id), job)
        except NoSuchJob:
            self._drop_unknown(asked)
        except (NoDaemon, TooMany) as error:
            _log.debug("%s; the calls are looked up later", error.message)

    def _end(self, call: _Call, job: JobView) -> None:
        if job.retried_as is not None:
            call.job, call.over, call.cancelled = job.retried_as, False, False
            return
        del self._running[call.number]
        outcome = self._files.outcome(call.number, job.id)
        self._settle(call, outcome or Outcome(error=_without_result(call, job)))

    def _drop_unknown(self, calls: list[_Call]) -> None:
        """Settle calls of jobs that the daemon no longer knows."""
        for call in calls:
            try:
                self._client.job(call.job)
            except NoSuchJob as error:
                del self._running[call.number]
                self._settle(call, Outcome(error=error))
            except GpuleaseError:
                continue

    def _settle(self, call: _Call, outcome: Outcome) -> None:
        self._files.forget(call.number)
        call.settle(outcome)


def _refuse_inside_a_lease(client: Client) -> None:
    known = config.environment().get("GPULEASE_JOB", "")
    around = client.nested(NestedRequest({"GPULEASE_JOB": to_wire(known)})) if known else None
    if around is not None and around.job is not None:
        label = around.job.label or around.job.id
        main = sys.modules["__main__"]
        if sys.modules.get("__mp_main__", main) is not main:  # multiprocessing imports the script
            raise AlreadyLeased(
                f"cannot use an Executor here: the call of job {label} imports the script to "
                "find its function, and the script submits calls as it is imported",
                'put them below if __name__ == "__main__": or install cloudpickle',
            )
        raise AlreadyLeased(
            f"cannot use an Executor within the lease of job {label}: that lease would "
            "wait for the calls, and the calls might wait for its memory",
            "start the script that submits the calls without gpulease run: it needs no GPU; "
            "if there is memory for both, Executor(..., new_lease=True)",
        )


def _without_result(call: _Call, job: JobView) -> CallFailed:
    why = job.reason or spoken(job.outcome or "it has ended")
    hint = job.hint or f"gpulease logs {job.id} shows its output"
    error = CallFailed(f"cannot get the result of job {job.id} ({call.name}): {why}", hint)
    error.job = job.id
    return error
