"""A worker's time: when it is up, and when the worker is warned of that."""

import signal
from collections.abc import Callable

from gpulease.process.loop import Loop
from gpulease.process.orders import EarlySignalOrder

_WARNING, _END = "early_signal", "time_limit"
"""Names of timers."""


class TimeLimit:
    """Call back when the time is up, and some time before.

    The warning comes once, and once more for a new limit whose warning is still to come: whoever
    handles the signal may do so for one only, and die of a second.
    """

    def __init__(
        self,
        loop: Loop,
        limit_s: float | None,
        early: EarlySignalOrder | None,
        warn: Callable[[int], None],
        end: Callable[[], None],
    ) -> None:
        """Measure nothing yet; `warn` gets the signal to send, `end` is for when it is up."""
        self._loop = loop
        self._limit_s = limit_s
        self._early = early if early and early.signal in signal.valid_signals() else None
        self._warn = warn
        self._end = end
        self._started_at: float | None = None
        self._warned = False

    def begin(self) -> None:
        """Count from now."""
        self._started_at = self._loop.now()
        self._arm()

    def set(self, limit_s: float | None) -> None:
        """Let it be so long from the start, instead of what it was; None: for ever.

        The same again, as a daemon says that has come back, changes nothing.
        """
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            self._arm()

    def _arm(self) -> None:
        self.cancel()
        if self._limit_s is None or self._started_at is None:
            return
        end_at = self._started_at + self._limit_s
        if self._early is not None:
            # Where that is past by now, it is due at once, and before the end.
            warn_at = end_at - max(0.0, self._early.before_s)
            if warn_at > self._loop.now() or not self._warned:
                self._loop.set_timer(_WARNING, warn_at, self._send)
        self._loop.set_timer(_END, end_at, self._end)

    def cancel(self) -> None:
        """Measure no longer."""
        for timer in (_WARNING, _END):
            self._loop.cancel_timer(timer)

    def _send(self) -> None:
        self._warned = True
        if self._early is not None:
            self._warn(self._early.signal)
