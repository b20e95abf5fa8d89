"""The signals that `run` takes for its job, made into something that can be waited for.

Handlers only note what came: what it means is decided where the job is followed.
"""

import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")

FORWARDED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
ENDING = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP})
"""Those that end a wait; the others have no meaning before there is a job."""


class Interrupted(Exception):
    """A signal that ends a wait has come."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Signals:
    """Catch signals for as long as the block lasts.

    One that was being ignored on the way in stays ignored, as nohup and shells mean it to be.
    """

    def __init__(self) -> None:
        self._caught: deque[signal.Signals] = deque()
        self._interruptible = False
        self._before: dict[signal.Signals, Any] = {}
        self._woken, self._waker = socket.socketpair()

    def __enter__(self) -> Self:
        for end in (self._woken, self._waker):
            end.setblocking(False)
        for signum in (*FORWARDED, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        # A job in the background that reads the terminal is stopped by this, unless it is ignored.
        self._before[signal.SIGTTIN] = signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        self._old_waker = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._old_waker)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._woken.close()
        self._waker.close()

    def fileno(self) -> int:
        """Return what becomes readable when a signal has come."""
        return self._woken.fileno()

    def take(self) -> tuple[signal.Signals, ...]:
        """Return what has come since the last call, oldest first."""
        with suppress(BlockingIOError):
            while self._woken.recv(64):
                pass
        taken = tuple(self._caught)
        for _ in taken:
            self._caught.popleft()
        return taken

    def interruptible(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns.

        Raises:
            Interrupted: a signal that ends a wait came before it did.
        """
        self._interruptible = True
        try:
            for signum in self._caught:
                if signum in ENDING:
                    raise Interrupted(signum)
            return call()
        finally:
            self._interruptible = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        signum = signal.Signals(number)
        self._caught.append(signum)
        if self._interruptible and signum in ENDING:
            raise Interrupted(signum)
