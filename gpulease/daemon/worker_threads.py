"""The daemon's threads, one for each kind of blocking work."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from gpulease.call_thread import CallThread
from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.service.log_once import LogOnce

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WELL_AFTER_S = 60.0
"""Time without a failure. On a nearly full disk, small writes succeed between failures."""


class ObservationThread:
    """Runs observations of the GPUs in order, and away from the event loop."""

    def __init__(self) -> None:
        self._thread: CallThread[Any] = CallThread("observer")

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""
        return asyncio.wrap_future(self._thread.enqueue(call).outcome)

    def close(self) -> None:
        """Do not wait for a call: a driver that hangs must not delay the daemon's end."""
        self._thread.close()


class _Call(NamedTuple):
    """A call for the writer, and who waits for its result."""

    work: Callable[[], Any]
    outcome: asyncio.Future[Any]


class _Answer(NamedTuple):
    """The result of a call, or its error."""

    outcome: asyncio.Future[Any]
    result: Any
    error: BaseException | None = None


class WriterThread:
    """Runs all writes to the database, in order, and logs their failures.

    Calls that have gathered while others ran are committed together. Each is answered after the
    commit. If the commit fails, all of them fail. Callers try again, and do not log the failure a
    second time.
    """

    def __init__(
        self,
        name: str,
        batch: Callable[[], AbstractContextManager[None]],
        steady: Callable[[], float] = time.monotonic,
        longest_batch_s: float = 0.005,
    ) -> None:
        """`batch` commits the writes within together.

        After `longest_batch_s` it takes no more calls: those that ran first wait for the others.
        """
        self._longest_batch_s = longest_batch_s
        self._batch = batch
        self._steady = steady
        self._failures = LogOnce(_log)
        self._failed_at = -_WELL_AFTER_S
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put(_Call(call, outcome))
        return outcome

    def close(self) -> None:
        """Finish the pending calls."""
        self._calls.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (first := self._calls.get()) is not None:
            answers = self._together(first)
            self._watch(answers)
            # The loop may have been closed meanwhile.
            with suppress(RuntimeError):
                first.outcome.get_loop().call_soon_threadsafe(_settle, answers)

    def _together(self, first: _Call) -> list[_Answer]:
        """Run calls and commit, and return the answers."""
        answers: list[_Answer] = []
        try:
            with self._batch():
                until = time.monotonic() + self._longest_batch_s
                answers.append(_run(first))
                while not self._calls.empty() and time.monotonic() < until:
                    call = self._calls.get()
                    if call is None:
                        self._calls.put(None)
                        break
                    answers.append(_run(call))
        except BaseException as error:  # noqa: BLE001 - raised again where the results are awaited
            return [each._replace(error=each.error or error) for each in answers]
        return answers

    def _watch(self, answers: Iterable[_Answer]) -> None:
        """Log the first of several failures to write, and that it is possible again."""
        errors = [each.error for each in answers if isinstance(each.error, RecordUnwritable)]
        for error in errors:
            self._failed_at = self._steady()
            error.is_in_the_log = True
            level = logging.ERROR if isinstance(error, RecordDamaged) else logging.WARNING
            self._failures.say("record", f"{error.message}; {error.hint}", level=level)
        is_well = not errors and self._steady() - self._failed_at >= _WELL_AFTER_S
        if is_well and self._failures.passed("record"):
            _log.info("the database can be written again")


def _run(call: _Call) -> _Answer:
    if call.outcome.cancelled():
        return _Answer(call.outcome, None)
    try:
        return _Answer(call.outcome, call.work())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
        return _Answer(call.outcome, None, error)


def _settle(answers: Iterable[_Answer]) -> None:
    for outcome, result, error in answers:
        if outcome.done():
            continue  # cancelled: nobody waits for it
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)
