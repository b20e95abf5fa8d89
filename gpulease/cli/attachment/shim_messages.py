"""The frames that the shim sends: the job's output, what happens to it, and how it ended."""

from __future__ import annotations

import time

from gpulease.cli.attachment import messages
from gpulease.cli.attachment.keyboard import AGAIN_WITHIN
from gpulease.cli.attachment.mode import AttachRefused, Left
from gpulease.cli.attachment.shim_connection import read_json
from gpulease.cli.exit_codes import JobEnd
from gpulease.record import replace
from gpulease.wire.frames import FrameKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal

    from gpulease.cli.attachment.console import Console
    from gpulease.cli.attachment.input import Suspension
    from gpulease.cli.attachment.mode import AttachMode
    from gpulease.cli.attachment.shim_connection import ShimConnection
    from gpulease.event_loop import EventLoop
else:
    import _signal as signal

_REPORT_OTHERS_AFTER_S = 2.0
"""Other processes of a job often end soon after its command."""
_LAUNCH_FAILED = "launch_failed"
"""The reason of a job that did not run; the daemon knows the exit code."""


class ShimMessages:
    """Shows what is for the user, and notes how the job ended."""

    def __init__(
        self,
        mode: AttachMode,
        connection: ShimConnection,
        console: Console,
        suspension: Suspension,
        loop: EventLoop,
    ) -> None:
        self._mode = mode
        self._connection = connection
        self._console = console
        self._suspension = suspension
        self._loop = loop
        self._broken_at: float | None = None
        self.ended = False
        self.ending: JobEnd | None = None
        """How the job ended, if it ran."""

    def take(self, kind: FrameKind, payload: bytes) -> None:
        """Act on one frame.

        Raises:
            AttachRefused: the shim refused this caller.
        """
        label = self._mode.label
        match kind:
            case FrameKind.STDOUT | FrameKind.STDERR:
                self._console.show(kind, payload)
                if kind == FrameKind.STDOUT:
                    self._insist_on_broken_pipe()
            case FrameKind.STOPPING:
                reason = str(read_json(payload).get("reason", ""))
                if message := messages.stopping(label, reason):
                    self._console.say(message)
            case FrameKind.EXITED:
                self._note_end(read_json(payload))
            case FrameKind.REFUSED:
                raise AttachRefused(str(read_json(payload).get("message", "")))
            case _:
                self._take_more(kind, read_json(payload))

    def report_broken_pipe(self) -> None:
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

    def note_lost_output(self) -> None:
        """Make an end without failure one with a failure if not all output could be written."""
        stdout, ending = self._console.stdout, self.ending
        if ending is None or not stdout.broken:
            return
        if self._broken_at is None:
            self._report_trouble()
        if ending.exit_code == 0 or ending.signal == signal.SIGPIPE:
            # As if the job itself had written there.
            end = (1, None) if stdout.trouble else (None, int(signal.SIGPIPE))
            self.ending = replace(ending, exit_code=end[0], signal=end[1])

    def _report_trouble(self) -> None:
        if trouble := self._console.stdout.trouble:
            self._console.say(messages.unwritable(trouble))

    def _insist_on_broken_pipe(self) -> None:
        # A job that ignores SIGPIPE, as Python does, would have failed at this write.
        if self._broken_at is not None and time.monotonic() - self._broken_at > AGAIN_WITHIN:
            self._broken_at = float("inf")
            self._connection.signal(signal.SIGTERM)

    def _take_more(self, kind: FrameKind, content: dict[str, object]) -> None:
        label = self._mode.label
        match kind:
            case FrameKind.SUSPENDED:
                self._suspension.note_job_stopped()
            case FrameKind.WATCHING:
                if self._console.writes:
                    self._console.only_watch()
                    self._console.say(messages.watching(self._mode))
            case FrameKind.MAIN_EXITED:
                words = messages.others_left(label)
                self._loop.set_timer_after(
                    "others", _REPORT_OTHERS_AFTER_S, lambda: self._console.say(words)
                )
            case FrameKind.SKIPPED:
                self._console.say(messages.skipped(label, int(str(content.get("bytes", 0)))))
            case _:
                pass  # STARTED needs no message, and a later version may send other frames.

    def _note_end(self, record: dict[str, object]) -> None:
        self.ended = True
        code, number = record.get("exit_code"), record.get("signal")
        if record.get("reason") != _LAUNCH_FAILED:
            self.ending = JobEnd(
                exit_code=code if isinstance(code, int) else None,
                signal=number if isinstance(number, int) else None,
                reason=str(record.get("reason")),
            )
