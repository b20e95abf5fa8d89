"""Counts the training steps of Keras, which `gpulease run --summary` shows.

It wraps two methods of CallbackList, through which every `fit` announces its batches. A callback of
its own would be seen by the script, and would make Keras wait for the results of each batch. An
unknown Keras is not counted.
"""

import functools
import time
from typing import Any, Callable

from . import report
from .hook import ReportFailure, Undo, lifting, replace, version_of
from .lease import Lease

BEGIN, END = "on_train_batch_begin", "on_train_batch_end"


class Counter:
    """The steps so far, and the seconds from the first batch of each epoch to its latest."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._first = 0
        self._since = time.monotonic()

    def begin(self, batch: int) -> None:
        """Note the first of the batches that run next."""
        self._first, self._since = batch, time.monotonic()

    def end(self, batch: int) -> None:
        """Count the batches up to this one."""
        # Several at once with steps_per_execution.
        self.steps += max(1, batch - self._first + 1)
        self.seconds += time.monotonic() - self._since
        self._since = time.monotonic()


def install(keras: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported Keras; `raw` is the lease as JSON."""
    lease = Lease(raw)
    try:
        return lifting(lease, *_hook(keras, lease))
    except Exception:  # noqa: BLE001  (an unknown Keras is not counted)
        return lease.lift


def _hook(keras: Any, lease: "Lease") -> "list[Undo]":
    owner, counter = keras.callbacks.CallbackList, Counter()
    begin, end = vars(owner)[BEGIN], vars(owner)[END]
    version = version_of(keras)

    @functools.wraps(begin)
    def on_train_batch_begin(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        _quietly(counter.begin, batch)
        return begin(self, batch, *args, **kwargs)

    @functools.wraps(end)
    def on_train_batch_end(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not counter.steps:
            report.count(lease, version, lambda: (counter.steps, counter.seconds))
        _quietly(lambda number: counter.end(_within(self, number)), batch)
        return end(self, batch, *args, **kwargs)

    return [
        replace([owner], BEGIN, begin, on_train_batch_begin),
        replace([owner], END, end, on_train_batch_end),
    ]


def _within(callbacks: Any, batch: int) -> int:
    """Return a batch of the epoch: with steps_per_execution, Keras counts beyond its end."""
    steps = (callbacks.params or {}).get("steps")
    return batch if steps is None else min(batch, steps - 1)


def _quietly(note: "Callable[[int], None]", batch: Any) -> None:
    try:
        note(int(batch))
    except Exception:  # noqa: BLE001  (a batch without a number)
        pass
