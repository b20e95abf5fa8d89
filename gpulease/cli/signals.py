"""The signals that `run` receives for its job, as something that poll(2) can wait for.

The handlers only note signals. What a signal means is decided where the job is followed.
"""

from __future__ import annotations

import os
import signal
from _socket import socketpair  # without `socket`, see `client.unix_socket`
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Self, TypeVar

    Result = TypeVar("Result")

FORWARDED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
WHILE_ATTACHED = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
"""Signals that are handled only while attached."""
DEADLY = (
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGXCPU,
    signal.SIGPOLL,
    signal.SIGPWR,
)
"""Signals that end the command at once, after it has restored its terminal."""
ENDING = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP})
"""Signals that end a wait in the queue; the others are dropped until the job runs."""


class Signalled(Exception):
    """A signal arrived."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


class Interrupted(Signalled):
    """A signal ended a wait."""


class Killed(Signalled):
    """This command ends by a signal, so that its parent sees that signal."""

    def take_effect(self) -> None:
        """End this process by that signal."""
        signal.signal(self.signum, signal.SIG_DFL)
        os.kill(os.getpid(), self.signum)


class EndedByInterrupt(Killed):
    """SIGINT ended the job, and ends this command: loops of a shell stop only then."""

    def __init__(self, *, ctrl_c_typed: bool) -> None:
        super().__init__(signal.SIGINT)
        self.ctrl_c_typed = ctrl_c_typed

    def take_effect(self) -> None:
        """End this process by SIGINT, unless it was started with SIGINT ignored.

        A Ctrl-C that was typed on the terminal of the job did not reach our own process group: a
        script that started us would continue with its next command. So the group gets it now.
        """
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.ctrl_c_typed:
            os.killpg(0, signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)


class Signals:
    """Catch signals while the block lasts.

    A signal that is ignored at the start stays ignored, as nohup(1) and shells rely on.
    """

    def __init__(self) -> None:
        self._caught: deque[int] = deque()
        self._interruptible = False
        self._before: dict[int, Any] = {}
        self._woken, self._waker = socketpair()

    def __enter__(self) -> Self:
        for end in (self._woken, self._waker):
            end.setblocking(False)
        for signum in (*FORWARDED, signal.SIGHUP):
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        # SIGTTIN would stop this command when it reads the terminal from the background.
        self._before[signal.SIGTTIN] = signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        self._old_waker = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.set_wakeup_fd(self._old_waker)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._woken.close()
        self._waker.close()

    def also(self, *signums: int) -> _Also:
        """Catch these signals as well while the block lasts."""
        return _Also(signums, self._note)

    def stop(self, *, group: bool) -> None:
        """Stop this process, or its process group, as Ctrl-Z does; return when it is continued.

        In an orphaned process group it returns at once.
        """
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0 if group else os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        # The return of this call says that we were continued; the SIGCONT says it again.
        for late in (signal.SIGTSTP, signal.SIGCONT):
            while late in self._caught:
                self._caught.remove(late)

    def fileno(self) -> int:
        """Return what becomes readable when a signal arrives."""
        return self._woken.fileno()

    def take(self) -> tuple[int, ...]:
        """Return the signals since the last call, oldest first."""
        try:
            while self._woken.recv(64):
                pass
        except BlockingIOError:
            pass
        taken = tuple(self._caught)
        for _ in taken:
            self._caught.popleft()
        return taken

    def interruptible(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Return what `call` returns for the arguments.

        Raises:
            Interrupted: a signal that ends a wait arrived first.
        """
        self._interruptible = True
        try:
            for signum in self._caught:
                if signum in ENDING:
                    raise Interrupted(signum)
            return call(*arguments)
        finally:
            self._interruptible = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._caught.append(number)
        if self._interruptible and number in ENDING:
            raise Interrupted(number)


class _Also:
    """Signals that are caught while the block lasts, unless they are ignored."""

    def __init__(
        self, signums: tuple[int, ...], note: Callable[[int, FrameType | None], None]
    ) -> None:
        self._before = {signum: signal.getsignal(signum) for signum in signums}
        self._note = note

    def __enter__(self) -> None:
        for signum, handler in self._before.items():
            if handler != signal.SIG_IGN:
                signal.signal(signum, self._note)

    def __exit__(self, *_error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


def name_of(signum: int) -> str:
    """Return the name of a signal, such as SIGUSR1; those for real time have none."""
    from signal import Signals

    try:
        return Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def can_be_continued() -> bool:
    """Tell whether a shell can continue our process group once it is stopped.

    The kernel does not stop an orphaned process group, which has no such shell: see setpgid(2).
    """
    group, session = os.getpgrp(), os.getsid(0)
    parent = os.getppid()
    try:
        while parent > 0 and os.getpgid(parent) == group:
            parent = parent_of(parent)
        return parent > 0 and os.getsid(parent) == session
    except (OSError, ValueError, IndexError):
        return True


def parent_of(pid: int) -> int:
    """Return the parent of a process.

    Raises:
        OSError: the process has ended.
        ValueError, IndexError: it ends at this moment.
    """
    # The name of the program, in parentheses, may contain any character.
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  pathlib takes too long to import
        return int(file.read().rpartition(b")")[2].split()[1])
