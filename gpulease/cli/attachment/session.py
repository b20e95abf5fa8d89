"""Attach this command to a job: pass on its output, and its input and signals, until it ends.

At most a piece of each stream is held, so a slow reader slows the job down and nothing is lost.
Ctrl-Z stops the job and gives the terminal back to the shell; `fg` continues both.
"""

from __future__ import annotations

import signal
import time
from socket import socket

from gpulease.cli.attachment.console import Console
from gpulease.cli.attachment.keyboard import AGAIN_WITHIN, name_of
from gpulease.cli.attachment.shim_connection import ShimConnection, read_json
from gpulease.cli.exit_codes import JobEnd
from gpulease.cli.signals import DEADLY, WHILE_ATTACHED, Killed, Signalled, can_be_continued
from gpulease.client.unix_socket import dial
from gpulease.event_loop import EventLoop
from gpulease.record import record, replace
from gpulease.wire.frames import FrameKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulease.cli.attachment.console import AttachMode
    from gpulease.cli.signals import Signals

_CHECK_FOREGROUND_EVERY_S = 0.5
_SOCKET = "socket"
_SENT_WITHIN_S = 1.0
"""Time for the shim to take what should reach it before this command stops or detaches."""
_EXPLAIN_KEYS_AFTER_S = 1.0
_REPORT_OTHERS_AFTER_S = 2.0
"""Other processes of a job often end soon after its command."""
_LAUNCH_FAILED = "launch_failed"
"""The reason of a job that did not run; the daemon knows the exit code."""


@record(frozen=True)
class Hooks:
    """What an attachment needs from the rest of the command."""

    cancel: Callable[[], str | None]
    """Cancel the job, and return why that failed."""
    say: Callable[[str], None]
    lines_of: Callable[[str], list[str]]
    """Break a message into lines of the terminal."""


class Left(Signalled):
    """We left and the job continues: the terminal closed, or a signal ended this command."""


class Detached(Exception):
    """We left and the job continues: the detach keys were typed."""


class AttachRefused(Exception):
    """The shim refused the attachment; the text is its reason."""


def attach(
    directory: str,
    signals: Signals,
    hooks: Hooks,
    mode: AttachMode,
    handles: tuple[int, int, int] = (0, 1, 2),
) -> JobEnd | None:
    """Stay with the job whose socket is in `directory`.

    Returns:
        How the job ended; None if the connection was lost before.

    Raises:
        OSError: nothing listens there.
        Left: SIGHUP arrived, or another signal that ends an attachment.
        Killed: a signal arrived that ends this command; the terminal was given back.
        Detached: the detach keys were typed.
        AttachRefused: the shim refused the connection.
    """
    with dial(f"{directory}/{_SOCKET}") as sock, signals.also(*WHILE_ATTACHED, *DEADLY):
        return _Attachment(sock, signals, hooks, mode, handles).run()


class _Attachment:
    def __init__(
        self,
        sock: socket,
        signals: Signals,
        hooks: Hooks,
        mode: AttachMode,
        handles: tuple[int, int, int],
    ) -> None:
        self._signals = signals
        self._mode = mode
        self._request_cancel = hooks.cancel
        self._loop = EventLoop()
        self._loop.on_readable(signals.fileno(), self._take_signals)
        self._console = Console(mode, handles, hooks.say, hooks.lines_of)
        self._connection = ShimConnection(sock)
        self._interrupted_at = float("-inf")
        self._ctrl_c_typed = False
        """Ctrl-C was passed on to the job as a key."""
        self._stop_was_passed_on = False
        """The signal was passed on to the job, so the job's stop needs no message."""
        self._broken_at: float | None = None
        """When standard output broke."""
        self._ended = False
        self._ending: JobEnd | None = None
        """How the job ended, if it ran."""

    def run(self) -> JobEnd | None:
        try:
            self._greet()
            while not (self._ended or self._connection.is_closed):
                self._watch()
                self._loop.step()
                if self._console.stdout.broken:
                    self._report_broken_pipe()
            if self._ending is None:
                self._console.tidy()
            self._console.drain(self._signals)
            self._note_lost_output()
            self._console.settle()
        finally:
            self._console.give_back()
        return self._ending and replace(self._ending, ctrl_c_typed=self._ctrl_c_typed)

    def _greet(self) -> None:
        size = self._console.window
        window = {"window": size} if size else {}
        self._connection.put_json(FrameKind.HELLO, role=self._mode.role, **window)
        if self._mode.started:
            return
        if self._mode.on_terminal and self._console.writes:
            # A full-screen program then redraws its screen.
            self._connection.signal(signal.SIGWINCH)
        if self._console.keys is not None:
            self._console.say(self._mode.greeting)
        elif self._mode.passes_input:
            what = f"it is passed to job {self._mode.label} unchanged"
            self._console.say(f"gpulease: standard input is no terminal; {what}")

    def _watch(self) -> None:
        """Watch the streams that can be used now."""
        self._watch_input()
        self._console.watch(self._loop)
        self._connection.watch(self._loop, None if self._console.is_full else self._receive)

    def _watch_input(self) -> None:
        stdin, connection = self._console.stdin, self._connection
        wanted = not stdin.ended and not connection.is_deaf and connection.has_room
        readable = wanted and stdin.is_ours
        if readable and self._console.hold():
            self._tell_window()
        self._loop.on_readable(stdin.handle, self._take_input if readable else None)
        self._loop.cancel_timer("foreground")
        if wanted and not readable:
            self._loop.set_timer_after("foreground", _CHECK_FOREGROUND_EVERY_S, lambda: None)

    def _receive(self) -> None:
        for kind, payload in self._connection.receive():
            self._take_frame(kind, payload)

    def _take_signals(self) -> None:
        for signum in self._signals.take():
            self._take_signal(signum)

    def _take_signal(self, signum: int) -> None:
        match signum:
            case signal.SIGHUP:
                raise Left(signum)
            case signal.SIGWINCH:
                self._tell_window()
            case signal.SIGCONT:
                self._go_on()
            case signal.SIGTSTP:
                self._stop_with_job()
            case _ if signum in DEADLY:
                self._console.tidy()
                self._console.settle()
                raise Killed(signum)
            case _ if self._is_not_for_the_job(signum):
                raise Left(signum)
            case signal.SIGINT:
                self._interrupt()
            case _:
                self._connection.signal(signum)

    def _is_not_for_the_job(self, signum: int) -> bool:
        joined = not self._mode.started
        return self._mode.watches or (joined and signum == signal.SIGTERM)

    # What is typed, or comes from a pipe.

    def _take_input(self) -> None:
        """Take what has arrived; call this when standard input is readable.

        Raises:
            Left: the terminal has hung up.
            Detached: the detach keys were typed.
        """
        stdin = self._console.stdin
        piece = stdin.read()
        if self._console.keys is not None:
            if piece:
                self._press(piece)
            elif stdin.ended:
                raise Left(signal.SIGHUP)
        elif piece:
            self._connection.put(FrameKind.STDIN, piece)
        elif stdin.ended:
            self._connection.put(FrameKind.STDIN_END)

    def _interrupt(self) -> None:
        """Interrupt the job; cancel it if this comes twice within a second."""
        again = time.monotonic() - self._interrupted_at < AGAIN_WITHIN
        self._interrupted_at = time.monotonic()
        if not (again and self._cancel()):
            self._connection.signal(signal.SIGINT)

    def _cancel(self) -> bool:
        trouble = self._request_cancel()
        if trouble is not None:
            self._console.say(trouble)
        return trouble is None

    def _press(self, piece: bytes) -> None:
        assert self._console.keys is not None
        board = self._console.keys.board
        pressed = board.press(piece, time.monotonic())
        if pressed.passed:
            self._connection.put(FrameKind.STDIN, pressed.passed)
        self._ctrl_c_typed = self._ctrl_c_typed or pressed.interrupt
        for signum in pressed.signals:
            self._interrupt() if signum == signal.SIGINT else self._connection.signal(signum)
        if pressed.cancel:
            self._cancel()
        self._loop.cancel_timer("keys")
        if board.waits:
            first, rest = name_of(self._mode.keys[:1]), name_of(self._mode.keys[1:])
            meaning = f"{rest} detaches; {first} again sends it once"
            words = f"gpulease: {meaning}; any other key sends both"
            self._loop.set_timer_after(
                "keys", _EXPLAIN_KEYS_AFTER_S, lambda: self._console.say(words)
            )
        if pressed.suspend:
            self._leave_running()
        if pressed.detach:
            self._detach()

    def _detach(self) -> None:
        self._console.tidy()
        label = self._mode.label
        how = f"gpulease attach {label}"
        self._console.say(f"gpulease: detached from job {label}, which continues: {how}")
        self._console.settle()
        self._connection.flush(_SENT_WITHIN_S)
        raise Detached

    # Ctrl-Z and fg.

    @property
    def _is_the_terminal(self) -> bool:
        """Whether this is the job's terminal, so that this command stops with the job."""
        here = self._console.keys is not None
        return here and self._mode.on_terminal and self._console.writes

    def _stop_with_job(self) -> None:
        """Act on SIGTSTP."""
        if not (self._mode.passes_input and self._console.writes):
            self._leave_running()
            return
        self._connection.signal(signal.SIGTSTP)
        if not self._is_the_terminal:
            self._stop_was_passed_on = True
            self._connection.flush(_SENT_WITHIN_S)
            self._signals.stop(group=False)
            self._go_on()

    def _note_job_stopped(self) -> None:
        """Act on a stop of the job's main process."""
        if self._stop_was_passed_on:
            self._stop_was_passed_on = False
            return
        text = f"gpulease: job {self._mode.label} is stopped and keeps its lease"
        if self._is_the_terminal:
            self._stop(f"{text}; fg continues it")
        else:
            self._console.say(text)

    def _leave_running(self) -> None:
        """Stop this command and not the job."""
        self._stop(f"gpulease: job {self._mode.label} continues; fg returns to it")

    def _go_on(self) -> None:
        """Continue after a stop; take the terminal only in the foreground."""
        self._console.hold_again()
        self._tell_window()
        if self._mode.passes_input and self._console.writes:
            self._connection.signal(signal.SIGCONT)

    def _tell_window(self) -> None:
        """Send the size of the terminal to the job."""
        if window := self._console.window:
            self._connection.put_json(FrameKind.WINDOW, **window)

    def _stop(self, why: str) -> None:
        """Stop this process group until a shell continues it; without a shell, continue."""
        if can_be_continued():
            self._console.say(why)
            self._console.settle()
            self._connection.flush(_SENT_WITHIN_S)
            self._console.give_back()
            self._signals.stop(group=True)
        self._go_on()

    # What the shim sends.

    def _take_frame(self, kind: FrameKind, payload: bytes) -> None:
        """Act on one frame.

        Raises:
            AttachRefused: the shim refused this caller.
        """
        match kind:
            case FrameKind.STDOUT | FrameKind.STDERR:
                self._console.show(kind, payload)
                if kind == FrameKind.STDOUT:
                    self._insist_on_broken_pipe()
            case FrameKind.STOPPING:
                self._say_why_it_ends(str(read_json(payload).get("reason", "")))
            case FrameKind.EXITED:
                self._note_end(read_json(payload))
            case FrameKind.REFUSED:
                raise AttachRefused(str(read_json(payload).get("message", "")))
            case _:
                self._take_more(kind, read_json(payload))

    def _report_broken_pipe(self) -> None:
        """Tell the job, once, that this command's standard output is broken.

        Raises:
            Left: the job must not be affected.
        """
        if self._broken_at is not None:
            return
        self._broken_at = time.monotonic()
        stdout = self._console.stdout
        if not self._mode.started or stdout.was_terminal:
            raise Left(signal.SIGHUP if stdout.was_terminal else signal.SIGPIPE)
        self._report_trouble()
        # A job that wrote to this pipe itself would have got this signal.
        self._connection.signal(signal.SIGPIPE)

    def _note_lost_output(self) -> None:
        """Make an end without failure one with a failure if not all output could be written."""
        stdout, ending = self._console.stdout, self._ending
        if ending is None or not stdout.broken:
            return
        if self._broken_at is None:
            self._report_trouble()
        if ending.exit_code == 0 or ending.signal == signal.SIGPIPE:
            # As if the job itself had written there.
            end = (1, None) if stdout.trouble else (None, int(signal.SIGPIPE))
            self._ending = replace(ending, exit_code=end[0], signal=end[1])

    def _report_trouble(self) -> None:
        if trouble := self._console.stdout.trouble:
            from gpulease.drawing.words import clean

            self._console.say(f"gpulease: cannot write the job's output: {clean(trouble)}")

    def _insist_on_broken_pipe(self) -> None:
        # A job that ignores SIGPIPE, as Python does, would have failed at this write.
        if self._broken_at is not None and time.monotonic() - self._broken_at > AGAIN_WITHIN:
            self._broken_at = float("inf")
            self._connection.signal(signal.SIGTERM)

    def _take_more(self, kind: FrameKind, content: dict[str, object]) -> None:
        label = self._mode.label
        match kind:
            case FrameKind.SUSPENDED:
                self._note_job_stopped()
            case FrameKind.WATCHING:
                if self._console.writes:
                    self._console.only_watch()
                    whose = f"the input of job {label} is that of the command that started it"
                    other = f"another terminal writes to job {label}; you are watching"
                    self._console.say(f"gpulease: {other if self._mode.on_terminal else whose}")
            case FrameKind.MAIN_EXITED:
                words = f"gpulease: the command of job {label} has ended; "
                words += "processes that it started still run"
                self._loop.set_timer_after(
                    "others", _REPORT_OTHERS_AFTER_S, lambda: self._console.say(words)
                )
            case FrameKind.SKIPPED:
                from gpulease.drawing.words import size

                missed = f"skipped {size(int(str(content.get('bytes', 0))))} of output"
                why = f"which came faster than it was read: gpulease logs {label}"
                self._console.say(f"gpulease: {missed}, {why}")
            case _:
                pass  # STARTED needs no message, and a later version may send other frames.

    def _say_why_it_ends(self, reason: str) -> None:
        """Say that the job is being ended, and why, unless its own output says so."""
        text = f"gpulease: job {self._mode.label}"
        match reason:
            case "time_limit":
                self._console.say(f"{text} has reached its time limit and is ending")
            case "over_lease" | "idle":
                pass
            case "cancelled" | "":
                self._console.say(f"{text} is ending")
            case _:
                from gpulease.drawing.words import clean

                self._console.say(f"{text} is ending: {clean(reason)}")

    def _note_end(self, record: dict[str, object]) -> None:
        self._ended = True
        code, number = record.get("exit_code"), record.get("signal")
        if record.get("reason") != _LAUNCH_FAILED:
            self._ending = JobEnd(
                exit_code=code if isinstance(code, int) else None,
                signal=number if isinstance(number, int) else None,
                reason=str(record.get("reason")),
            )
