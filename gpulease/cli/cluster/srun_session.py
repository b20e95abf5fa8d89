"""One srun from its start to its end, with the terminal, streams and signals of this command.

The job ends with this command: nobody can leave srun and join it again.
"""

import signal
import time
from functools import partial

from gpulease.cli.attachment import AGAIN_WITHIN, AttachMode, Console, unwritable
from gpulease.cli.cluster import job_texts
from gpulease.cli.cluster.output_log import OutputLog
from gpulease.cli.cluster.prolog_words import PrologWords
from gpulease.cli.cluster.srun import Said, Srun
from gpulease.cli.render import StderrStatus, message_lines
from gpulease.cli.signals import DEADLY, ENDING, Killed, Signals, name_of
from gpulease.errors import GpuleaseError, SlurmFailed
from gpulease.event_loop import EventLoop
from gpulease.record import record
from gpulease.slurm.commands import run_slurm
from gpulease.wire.frames import FrameKind

_CHECK_FOREGROUND_EVERY_S = 0.5
_ASK_FIRST_AFTER_S, _ASK_EVERY_S = 0.3, 10.0
"""Seconds between questions why a job waits: slurmctld answers those of all users."""
_CLOSED_PIPE_S = 5.0
"""Seconds for a job to end by SIGPIPE after its output was closed."""
_MOST_REPEATED = 1 << 20
"""Bytes of input that are kept for another attempt."""
_PROLOG_S = 2.0
"""Seconds for a task prolog that has printed why to end."""
_END_OF_FILE = b"\x04"


@record(frozen=True)
class Result:
    """How srun ended."""

    status: int
    """Its exit code, as a shell shows it."""
    said: Said
    gave_up: bool = False
    """The job did not start within --wait."""
    interrupted: int | None = None
    """The signal that ended the wait, or closed the terminal."""
    ctrl_c_typed: bool = False
    prolog_failed: str | None = None
    """Why the node did not start the command."""


class Streams:
    """The streams of this command, which several attempts use one after the other."""

    def __init__(self, signals: Signals, stderr: StderrStatus, *, on_terminal: bool) -> None:
        self.signals = signals
        self.stderr = stderr
        self.on_terminal = on_terminal
        mode = AttachMode(label="", on_terminal=on_terminal)
        self.console = Console(mode, (0, 1, 2), stderr.print, message_lines)
        self.passed = bytearray()
        """Input that earlier attempts got."""
        self.can_repeat = True
        """Another attempt would get all of the input."""

    def keep(self, piece: bytes) -> None:
        """Keep input for another attempt."""
        self.can_repeat = self.can_repeat and len(self.passed) + len(piece) <= _MOST_REPEATED
        if self.can_repeat:
            self.passed += piece


class Session:
    """Stays with one srun."""

    def __init__(self, srun: Srun, streams: Streams, give_up_at: float | None) -> None:
        """`give_up_at`: when to give up a job that waits, on the monotonic clock."""
        self._srun = srun
        self._said = srun.said
        self._streams = streams
        self._console, self._signals = streams.console, streams.signals
        self._stderr = streams.stderr
        self._give_up_at = give_up_at
        self._loop = EventLoop()
        self._log: OutputLog | None = None
        self._prolog = PrologWords()
        self._gave_up = False
        self._interrupted: int | None = None
        self._interrupted_at = float("-inf")
        self._ctrl_c_typed = False
        self._told_loss = False

    def run(self) -> Result:
        """Return how srun ended.

        Raises:
            Killed: a signal ends this command at once; the terminal was given back.
        """
        with self._signals.also(signal.SIGWINCH, *DEADLY):
            try:
                self._run()
            finally:
                self._console.give_back()
                self._stderr.line.clear()
        return Result(
            self._srun.wait(), self._said, self._gave_up, self._interrupted, self._ctrl_c_typed,
            self._prolog.text if self._prolog.failed else None,
        )  # fmt: skip

    def _run(self) -> None:
        self._repeat_input()
        self._loop.on_readable(self._signals.fileno(), self._take_signals)
        if self._give_up_at is not None:
            self._loop.set_timer("give up", self._give_up_at, self._give_up)
        while not self._srun.ended:
            self._watch()
            self._loop.step()
            if self._console.stdout.broken and not self._told_loss:
                self._report_loss()
        self._release()
        self._console.drain(self._signals)
        self._console.settle()
        if self._log is not None:
            self._log.close()

    # Streams.

    def _watch(self) -> None:
        """Watch the streams that can be used now."""
        loop, srun = self._loop, self._srun
        self._watch_input()
        self._console.watch(loop)
        for fd, kind in srun.outputs.items():
            receive = None if self._console.is_full else partial(self._receive, fd, kind)
            loop.on_readable(fd, receive)
        if srun.words is not None:
            loop.on_readable(srun.words, self._listen)
        if not srun.is_deaf:
            loop.on_writable(srun.input, self._send if srun.has_unsent else None)

    def _watch_input(self) -> None:
        stdin = self._console.stdin
        wanted = self._said.started and not stdin.ended and self._srun.has_room
        readable = wanted and stdin.is_ours
        if readable and self._console.hold():
            self._tell_window()
        self._loop.on_readable(stdin.handle, self._take_input if readable else None)
        self._loop.cancel_timer("foreground")
        if wanted and not readable:
            self._loop.set_timer_after("foreground", _CHECK_FOREGROUND_EVERY_S, lambda: None)

    def _send(self) -> None:
        self._srun.send()
        if self._srun.is_deaf:
            self._loop.on_writable(self._srun.input, None)

    def _receive(self, fd: int, kind: FrameKind) -> None:
        piece = self._srun.read(fd)
        if fd not in self._srun.outputs:
            self._loop.forget(fd)
        if piece:
            self._take_output(kind, piece)

    def _take_output(self, kind: FrameKind, piece: bytes) -> None:
        self._show(kind, self._prolog.take(kind, piece))

    def _release(self) -> None:
        """Show output that was withheld: a prolog would have ended by now."""
        if not self._prolog.failed:
            self._show(FrameKind.STDOUT, self._prolog.release())

    def _show(self, kind: FrameKind, piece: bytes) -> None:
        if not piece:
            return
        if not self._said.started:
            self._said.started = True
            self._introduce()
        self._console.show(kind, piece)
        if self._log is not None:
            self._log.write(piece)

    def _listen(self) -> None:
        """Take what srun says, and act on its news."""
        fd, waited, started = self._srun.words, self._said.waits, self._said.started
        notices = self._srun.listen()
        if self._srun.words is None and fd is not None:
            self._loop.forget(fd)
        for notice in notices:
            self._console.say(notice)
        if self._said.waits and not waited:
            self._loop.set_timer_after("ask", _ASK_FIRST_AFTER_S, self._show_wait)
        if self._said.started and not started:
            self._introduce()

    def _introduce(self) -> None:
        """Say where the job has started, and open its log."""
        self._loop.cancel_timer("ask")
        self._loop.cancel_timer("give up")
        self._stderr.line.clear()
        if self._said.job is None:
            return
        self._stderr.print(job_texts.started(self._said.job, self._said.node))
        self._loop.set_timer_after("prolog", _PROLOG_S, self._release)
        try:
            self._log = OutputLog(self._said.job, self._console.say)
        except OSError as error:
            self._stderr.print(job_texts.no_log(error))

    def _show_wait(self) -> None:
        """Show why the job waits, and cancel one that can never start."""
        from gpulease.cli.cluster.jobs import read_queue

        if not self._said.waits:
            return
        self._loop.set_timer_after("ask", _ASK_EVERY_S, self._show_wait)
        try:
            row = read_queue(jobs=[str(self._said.job)])[0]
        except (SlurmFailed, IndexError):
            return  # slurmctld is away, or the job starts
        now = self._stderr.now()
        self._stderr.line.show(job_texts.waiting(row, now), now)
        if reason := job_texts.never_starts(row):
            self._said.errors.append(f"it can never start: {reason}")
            self._srun.signal(signal.SIGTERM)

    def _take_input(self) -> None:
        stdin = self._console.stdin
        piece = stdin.read()
        if self._console.keys is not None:
            if piece:
                self._press(piece)
            elif stdin.ended:
                self._hang_up(signal.SIGHUP)
        elif piece:
            self._streams.keep(piece)
            self._srun.put(piece)
        elif stdin.ended:
            self._end_input()

    def _repeat_input(self) -> None:
        """Pass on what earlier attempts got."""
        self._srun.put(bytes(self._streams.passed))
        if self._console.stdin.ended:
            self._end_input()

    def _end_input(self) -> None:
        if self._streams.on_terminal:
            self._srun.put(_END_OF_FILE)
        else:
            self._loop.on_writable(self._srun.input, None)
            self._srun.end_input()

    def _press(self, piece: bytes) -> None:
        assert self._console.keys is not None
        pressed = self._console.keys.board.press(piece, time.monotonic())
        self._srun.put(pressed.passed)
        self._ctrl_c_typed = self._ctrl_c_typed or pressed.interrupt
        if pressed.cancel:
            self._cancel()

    def _tell_window(self) -> None:
        if window := self._console.window:
            self._srun.resize(window["rows"], window["columns"])

    def _report_loss(self) -> None:
        """Act on output that cannot be written: a closed pipe ends the job, as it would here."""
        self._told_loss = True
        if trouble := self._console.stdout.trouble:
            self._console.say(unwritable(trouble))
            return
        self._signal_job(signal.SIGPIPE)
        self._loop.set_timer_after("closed pipe", _CLOSED_PIPE_S, self._cancel)

    # Signals.

    def _take_signals(self) -> None:
        for signum in self._signals.take():
            self._take_signal(signum)

    def _take_signal(self, signum: int) -> None:
        if signum == signal.SIGWINCH:
            self._tell_window()
        elif signum in DEADLY:
            self._console.tidy()
            self._console.settle()
            raise Killed(signum)
        elif not self._said.started:
            self._before_start(signum)
        elif signum == signal.SIGHUP:
            self._hang_up(signum)
        elif signum == signal.SIGINT:
            self._interrupt()
        elif signum in (signal.SIGTERM, signal.SIGQUIT):
            self._signal_job(signum)
        else:
            self._srun.signal(signum)

    def _before_start(self, signum: int) -> None:
        """Act on a signal while the job waits: most cancel it."""
        if signum in ENDING:
            self._interrupted = signum
            self._srun.signal(signal.SIGTERM)
        else:
            self._stderr.print(f"gpulease: ignored {name_of(signum)}: the job had not started")

    def _interrupt(self) -> None:
        """Interrupt the job; cancel it if this comes twice within a second."""
        again = time.monotonic() - self._interrupted_at < AGAIN_WITHIN
        self._interrupted_at = time.monotonic()
        if again:
            self._cancel()
        else:
            self._srun.signal(signal.SIGINT)

    def _hang_up(self, signum: int) -> None:
        """End the job: nobody could return to it."""
        self._interrupted = signum
        self._console.stdin.ended = True
        self._cancel()

    def _cancel(self) -> None:
        if not self._tell_slurm("scancel", str(self._said.job)):
            self._srun.signal(signal.SIGTERM)  # it kills the job without slurmctld

    def _signal_job(self, signum: int) -> None:
        """Send a signal that srun would not pass on."""
        self._tell_slurm("scancel", f"--signal={signum:d}", str(self._said.job))

    def _give_up(self) -> None:
        """Cancel the job unless it is just about to start."""
        self._gave_up = True
        if not self._said.waits or not self._tell_slurm(
            "scancel", "--state=PENDING", str(self._said.job)
        ):
            self._srun.signal(signal.SIGTERM)

    def _tell_slurm(self, *line: str) -> bool:
        try:
            run_slurm(line)
        except GpuleaseError as error:
            self._console.say(f"gpulease: {error.message}")
            return False
        return True
