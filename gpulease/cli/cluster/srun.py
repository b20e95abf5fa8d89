"""srun as a child of this command: its streams, and what it says about the job.

The output of the job and the words of srun are separate: srun writes the former to descriptors that
it opens (/dev/fd/N), or to a pseudo-terminal, and the latter to its standard error, where they are
read. srun is in a session of its own, so that a key typed here does not reach it too.
"""

import os
import pty
import re
import signal
import subprocess
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpulease.cli.attachment import PIECE
from gpulease.cli.exit_codes import SIGNALED
from gpulease.cli.format import clean
from gpulease.slurm.commands import not_installed
from gpulease.wire.frames import FrameKind
from gpulease.write_buffer import WriteBuffer

_QUIET = ("srun", "-v", "--disable-status")
"""With -v it names the job and its node; without a status, it passes SIGINT on at once."""
_QUEUED = re.compile(r"srun: job (\d+) queued")
_PLACED = re.compile(r"srun: job(?:id)? (\d+): nodes\(\d+\):`([^']*)'")
_LAUNCHED = re.compile(r"srun: launch.*_task_start: |srun: .*: \d+ tasks? started")
_STATUS = re.compile(r"\(status=0x([0-9a-f]{4})\)")
_ENDED = re.compile(r"srun: (?:error: )?.*(?:_task_finish|: tasks? [\d,-]+: )")
_ERROR = re.compile(r"srun: (?:error|fatal): (.*)")
_NOTICE = re.compile(r"srun: gpulease: ")
_OPTIONS_READ = "defined options"
_BUSY = "Requested nodes are busy"


class Said:
    """What srun has said about the job."""

    def __init__(self) -> None:
        self.job: int | None = None
        self.node: str | None = None
        self.waits = False
        """It is queued, and not placed yet."""
        self.started = False
        self.ended = False
        """A task ended, so that the exit code is that of the job."""
        self.wait_status = 0
        """How the task ended, as in wait(2). srun itself may exit with 0 after a cancellation."""
        self.errors: list[str] = []
        self.first = ""
        """Its first words; of options that it does not understand, all that it says."""
        self._rest = b""

    @property
    def complaint(self) -> str:
        """What it says if it does not understand its options."""
        return "" if self.first.startswith(_OPTIONS_READ) else self.first

    @property
    def busy(self) -> bool:
        """Whether srun gave up at once, as with --immediate."""
        return any(_BUSY in error for error in self.errors)

    def hear(self, piece: bytes) -> list[str]:
        """Take what srun wrote to its standard error; return notices of the node's daemon."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        words = [line.decode(errors="replace").rstrip("\r") for line in lines]
        for line in words:
            self._take(line)
        return [clean(line.removeprefix("srun: ")) for line in words if _NOTICE.match(line)]

    def _take(self, line: str) -> None:
        if found := _QUEUED.match(line):
            self.job, self.waits = int(found[1]), True
        elif found := _PLACED.match(line):
            self.job, self.node, self.waits = int(found[1]), found[2], False
        elif _LAUNCHED.match(line):
            self.started = True
        elif _ENDED.match(line):
            self.ended = True
            if found := _STATUS.search(line):
                self.wait_status = max(self.wait_status, int(found[1], 16))
        elif found := _ERROR.match(line):
            self.errors.append(found[1])
        elif not self.first:
            self.first = line.removeprefix("srun: ")


class Srun:
    """A running srun."""

    def __init__(
        self, words: Sequence[str], variables: Mapping[str, str], size: tuple[int, int] | None
    ) -> None:
        """Start srun; with a size (rows and columns), behind a pseudo-terminal.

        Raises:
            SlurmFailed: it is not installed.
        """
        self.said = Said()
        self.is_deaf = False
        """It takes no more input."""
        self.outputs: dict[int, FrameKind] = {}
        """What the job's output arrives on."""
        self._unsent = WriteBuffer()
        self._input_ends = False
        if size is None:
            self._start_with_pipes(words, variables)
        else:
            self._start_with_terminal(words, variables, size)
        assert self._process.stderr is not None
        self.words: int | None = self._process.stderr.fileno()
        """What srun's words arrive on; None after their end."""
        for fd in (self.input, self.words, *self.outputs):
            os.set_blocking(fd, False)

    def _start_with_pipes(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        (out, out_end), (err, err_end), (in_end, self.input) = (os.pipe() for _ in range(3))
        self.outputs = {out: FrameKind.STDOUT, err: FrameKind.STDERR}
        streams = (f"--output=/dev/fd/{out_end}", f"--error=/dev/fd/{err_end}")
        self._spawn((*_QUIET, *streams, *words), variables, in_end, (out_end, err_end))

    def _start_with_terminal(
        self, words: Sequence[str], variables: Mapping[str, str], size: tuple[int, int]
    ) -> None:
        self.input, end = pty.openpty()
        termios.tcsetwinsize(end, size)
        self.outputs = {self.input: FrameKind.STDOUT}
        self._spawn((*_QUIET, "--pty", *words), variables, end, ())

    def _spawn(
        self,
        line: Sequence[str],
        variables: Mapping[str, str],
        stream: int,
        passed: tuple[int, ...],
    ) -> None:
        """Start srun, which the kernel ends with this command; close its ends of the streams."""
        has_setpriv = any(os.access(f"{each}/setpriv", os.X_OK) for each in os.get_exec_path())
        bound = ["setpriv", "--pdeathsig=TERM", "--"] if has_setpriv else []
        try:
            self._process = subprocess.Popen(
                [*bound, *line], stdin=stream,
                stdout=subprocess.DEVNULL if passed else stream, stderr=subprocess.PIPE,
                pass_fds=passed, env=dict(variables), start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            raise not_installed(line) from None
        finally:
            for fd in (stream, *passed):
                os.close(fd)

    # Streams.

    @property
    def ended(self) -> bool:
        """Whether all that it writes to is closed."""
        return not self.outputs and self.words is None

    @property
    def has_room(self) -> bool:
        """Whether to read more input for the job."""
        return self._unsent.size < PIECE and not self.is_deaf

    @property
    def has_unsent(self) -> bool:
        """Whether input waits for room."""
        return self._unsent.size > 0 and not self.is_deaf

    def read(self, fd: int) -> bytes:
        """Return what has arrived on one of the `outputs`; nothing more comes after b""."""
        piece = _read(fd)
        if piece == b"":
            del self.outputs[fd]
            if fd == self.input:
                self.is_deaf = True
            else:
                os.close(fd)
        return piece or b""

    def listen(self) -> list[str]:
        """Take what srun has said, and return what the node's daemon says through it."""
        assert self.words is not None
        piece = _read(self.words)
        if piece == b"":
            self.words = None
        return self.said.hear(piece or b"")

    def put(self, piece: bytes) -> None:
        """Queue input for the job."""
        if not self.is_deaf:
            self._unsent.add(piece)

    def end_input(self) -> None:
        """Close the input once all of it is sent; a terminal has no such end."""
        self._input_ends = True
        if not self._unsent.size:
            self._close_input()

    def send(self) -> None:
        """Write the input that there is room for."""
        try:
            self._unsent.write_once(lambda pieces: os.writev(self.input, pieces))
        except BlockingIOError:
            return
        except OSError:  # the job has ended
            self.is_deaf = True
            self._unsent.clear()
        if self._input_ends and not self._unsent.size:
            self._close_input()

    def _close_input(self) -> None:
        if not self.is_deaf:
            self.is_deaf = True
            os.close(self.input)

    # Signals.

    def signal(self, signum: int) -> None:
        """Send a signal to srun: it passes SIGINT, SIGUSR1 and SIGUSR2 on."""
        self._process.send_signal(signum)

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal of the job its size."""
        with suppress(OSError):
            termios.tcsetwinsize(self.input, (rows, columns))
            self.signal(signal.SIGWINCH)

    def wait(self) -> int:
        """Return the exit code of srun, as a shell shows it, once it has ended."""
        status = self._process.wait() or os.waitstatus_to_exitcode(self.said.wait_status & 0xFF7F)
        return status if status >= 0 else SIGNALED - status


def _read(fd: int) -> bytes | None:
    """Return what there is, b"" at the end, or None for nothing now."""
    try:
        return os.read(fd, PIECE)
    except BlockingIOError:
        return None
    except OSError:  # EIO: the other end of a terminal is closed
        return b""
