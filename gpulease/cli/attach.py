"""Be the terminal of a job: its output to ours, our input and signals to it, until it has ended.

One loop over poll(2): it holds at most a piece of each stream, so a slow reader slows the job, and
nothing is lost.
"""

import json
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpulease.cli.signals import Signals
from gpulease.cli.streams import PIECE, Inlet, Outlet
from gpulease.client import dial
from gpulease.frames import BadFrame, FrameKind, FrameReader, frame

AGAIN_WITHIN = 1.0
"""Seconds: a second Ctrl-C as soon as this means it."""
_LOOKS_AT_FOREGROUND_EVERY = 1.0
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR
_SOCKET = "socket"
_LAUNCH_FAILED = "launch_failed"
"""The reason in an end that was no run: what then to exit with, the daemon knows."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended, by its shim."""

    exit_code: int | None
    signal: int | None
    reason: str
    """ "exited", "signaled", or why it was asked to go: "cancelled", "time_limit" and others."""


class Left(Exception):
    """The job goes on and nobody is attached: our terminal has gone."""


class TurnedAway(Exception):
    """The shim lets this caller not attach; the text is its reason."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an attachment asks of the rest of the command."""

    cancel: Callable[[], bool]
    """Ask the daemon to end the job; whether it will."""
    stopping: Callable[[str], None]
    """The job was asked to go, for this reason."""
    unwritable: Callable[[str], None]
    """Our standard output takes nothing more, for this reason."""


def attach(
    directory: Path, signals: Signals, hooks: Hooks, handles: tuple[int, int, int] = (0, 1, 2)
) -> Ending | None:
    """Stay with the job whose socket is in `directory`; None if its shim went without a word.

    Raises:
        OSError: nothing listens there.
        Left: SIGHUP came.
        TurnedAway: the shim does not let this caller attach.
    """
    with dial(directory / _SOCKET) as link:
        return _Attachment(link, signals, hooks, handles).run()


class _Attachment:
    def __init__(
        self, link: socket.socket, signals: Signals, hooks: Hooks, handles: tuple[int, int, int]
    ) -> None:
        link.setblocking(False)
        self._link = link
        self._signals = signals
        self._hooks = hooks
        self._stdin = Inlet(handles[0])
        self._outlets = {
            FrameKind.STDOUT: Outlet(handles[1]),
            FrameKind.STDERR: Outlet(handles[2]),
        }
        self._frames = FrameReader()
        self._unsent = bytearray(frame(FrameKind.HELLO, b'{"role": "attach"}'))
        self._gone = False
        """The shim has closed, or has told the end, or says what no shim says."""
        self._ending: Ending | None = None
        self._interrupted_at = float("-inf")
        self._broken_at: float | None = None

    def run(self) -> Ending | None:
        while not self._gone:
            self._turn()
        while any(outlet.wants_room for outlet in self._outlets.values()):
            # A signal now has no job to go to: it ends the wait for a reader who does not read.
            if self._drain():
                break
        return self._ending

    def _turn(self) -> None:
        ready = self._poll()
        if self._signals.fileno() in ready:
            for signum in self._signals.take():
                self._pass_on(signum)
        self._serve_streams(ready)
        events = ready.get(self._link.fileno(), 0)
        if events & select.POLLOUT:
            self._send()
        if events & _READABLE:
            self._receive()

    def _serve_streams(self, ready: dict[int, int]) -> None:
        for outlet in self._outlets.values():
            if outlet.handle in ready:
                outlet.write()
        if self._outlets[FrameKind.STDOUT].broken and self._broken_at is None:
            self._nobody_reads()
        if self._stdin.handle in ready:
            self._take_input()

    def _poll(self) -> dict[int, int]:
        poller = select.poll()
        poller.register(self._signals.fileno(), select.POLLIN)
        full = False
        for outlet in self._outlets.values():
            full = full or outlet.is_full
            if outlet.wants_room:
                poller.register(outlet.handle, select.POLLOUT)
        wanted = (0 if full else select.POLLIN) | (select.POLLOUT if self._unsent else 0)
        if wanted:  # With nothing wanted, a hang-up would still be told, over and over.
            poller.register(self._link, wanted)
        listens = not self._stdin.ended and len(self._unsent) < PIECE
        ours = listens and self._stdin.is_ours
        if ours:
            poller.register(self._stdin.handle, select.POLLIN)
        timeout = None if ours or not listens else _LOOKS_AT_FOREGROUND_EVERY * 1000
        return dict(poller.poll(timeout))

    def _drain(self) -> bool:
        poller = select.poll()
        poller.register(self._signals.fileno(), select.POLLIN)
        for outlet in self._outlets.values():
            if outlet.wants_room:
                poller.register(outlet.handle, select.POLLOUT)
        ready = dict(poller.poll())
        for outlet in self._outlets.values():
            if outlet.handle in ready:
                outlet.write()
        return self._signals.fileno() in ready and bool(self._signals.take())

    def _pass_on(self, signum: signal.Signals) -> None:
        if signum == signal.SIGHUP:
            raise Left
        if signum == signal.SIGINT:
            again = time.monotonic() - self._interrupted_at < AGAIN_WITHIN
            self._interrupted_at = time.monotonic()
            if again and self._hooks.cancel():
                return
        self._signal(signum)

    def _signal(self, signum: signal.Signals) -> None:
        self._unsent += frame(FrameKind.SIGNAL, json.dumps({"signal": int(signum)}).encode())

    def _nobody_reads(self) -> None:
        # What a write to this pipe would have done to the job, had it held the pipe itself.
        self._broken_at = time.monotonic()
        if trouble := self._outlets[FrameKind.STDOUT].trouble:
            self._hooks.unwritable(trouble)
        self._signal(signal.SIGPIPE)

    def _take_input(self) -> None:
        piece = self._stdin.read()
        if piece:
            self._unsent += frame(FrameKind.STDIN, piece)
        elif self._stdin.ended:
            self._unsent += frame(FrameKind.STDIN_END)

    def _send(self) -> None:
        try:
            sent = self._link.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            # It reads no more, and may still have something to say.
            self._unsent.clear()
            self._stdin.ended = True
            return
        del self._unsent[:sent]

    def _receive(self) -> None:
        try:
            piece = self._link.recv(PIECE)
            self._gone = not piece
            for kind, payload in self._frames.feed(piece):
                self._take(kind, payload)
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            self._gone = True

    def _take(self, kind: FrameKind, payload: bytes) -> None:
        match kind:
            case FrameKind.STDOUT:
                self._outlets[kind].put(payload)
                self._insist_that_nobody_reads()
            case FrameKind.STDERR:
                self._outlets[kind].put(payload)
            case FrameKind.STOPPING:
                self._hooks.stopping(str(_read(payload).get("reason", "")))
            case FrameKind.EXITED:
                self._note_end(_ending(_read(payload)))
            case FrameKind.REFUSED:
                raise TurnedAway(str(_read(payload).get("message", "")))
            case _:
                pass  # STARTED is no news to us, nor is what a later version may say.

    def _note_end(self, ending: Ending) -> None:
        self._gone = True
        self._ending = None if ending.reason == _LAUNCH_FAILED else ending

    def _insist_that_nobody_reads(self) -> None:
        # A job that ignores SIGPIPE (Python does) and writes on would have failed at this write.
        if self._broken_at is not None and time.monotonic() - self._broken_at > AGAIN_WITHIN:
            self._broken_at = float("inf")
            self._signal(signal.SIGTERM)


def _read(payload: bytes) -> dict[str, object]:
    try:
        found = json.loads(payload)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _ending(record: dict[str, object]) -> Ending:
    code, number = record.get("exit_code"), record.get("signal")
    return Ending(
        exit_code=code if isinstance(code, int) else None,
        signal=number if isinstance(number, int) else None,
        reason=str(record.get("reason")),
    )
