"""What the shim says of the job: its output, what happens to it, and how it ended."""

import signal
import time

from gpulease.cli.attachment import messages
from gpulease.cli.attachment.console import Console
from gpulease.cli.attachment.input import Suspension
from gpulease.cli.attachment.keyboard import AGAIN_WITHIN
from gpulease.cli.attachment.link import Alarms, ShimConnection, read_json
from gpulease.cli.attachment.mode import AttachMode, Left, TurnedAway
from gpulease.cli.exit_codes import JobEnd
from gpulease.wire.frames import FrameKind

_TELLS_OF_OTHERS_AFTER = 2.0
_LAUNCH_FAILED = "launch_failed"
"""The reason in an end that was no run: what then to exit with, the daemon knows."""


class ShimMessages:
    """Show what is for the user, and note how the job ended."""

    def __init__(
        self,
        manner: AttachMode,
        link: ShimConnection,
        console: Console,
        suspension: Suspension,
        alarms: Alarms,
    ) -> None:
        self._manner = manner
        self._link = link
        self._console = console
        self._suspension = suspension
        self._alarms = alarms
        self._broken_at: float | None = None
        self.ended = False
        self.ending: JobEnd | None = None
        """How it ended, where it was a run."""

    def take(self, kind: FrameKind, payload: bytes) -> None:
        """Take in one frame.

        Raises:
            TurnedAway: the shim does not let this caller attach.
        """
        number = self._manner.number
        match kind:
            case FrameKind.STDOUT | FrameKind.STDERR:
                self._console.show(kind, payload)
                if kind is FrameKind.STDOUT:
                    self._insist_that_nobody_reads()
            case FrameKind.STOPPING:
                reason = str(read_json(payload).get("reason", ""))
                if said := messages.stopping(number, reason):
                    self._console.say(said)
            case FrameKind.EXITED:
                self._note_end(read_json(payload))
            case FrameKind.REFUSED:
                raise TurnedAway(str(read_json(payload).get("message", "")))
            case _:
                self._take_more(kind, read_json(payload))

    def nobody_reads(self) -> None:
        """Tell the job, once, that nothing can be written to our standard output any more.

        Raises:
            Left: the job is not to know.
        """
        if self._broken_at is not None:
            return
        self._broken_at = time.monotonic()
        stdout = self._console.stdout
        if not self._manner.started or stdout.was_terminal:
            raise Left(signal.SIGHUP if stdout.was_terminal else signal.SIGPIPE)
        if trouble := stdout.trouble:
            self._console.say(messages.unwritable(trouble))
        # What a write to this pipe would have done to the job, had it held the pipe itself.
        self._link.signal(signal.SIGPIPE)

    def _insist_that_nobody_reads(self) -> None:
        # A job that ignores SIGPIPE (Python does) and writes on would have failed at this write.
        if self._broken_at is not None and time.monotonic() - self._broken_at > AGAIN_WITHIN:
            self._broken_at = float("inf")
            self._link.signal(signal.SIGTERM)

    def _take_more(self, kind: FrameKind, content: dict[str, object]) -> None:
        number = self._manner.number
        match kind:
            case FrameKind.SUSPENDED:
                self._suspension.note()
            case FrameKind.WATCHING:
                if self._console.writes:
                    self._console.only_watch()
                    self._console.say(messages.watching(self._manner))
            case FrameKind.MAIN_EXITED:
                words = messages.others_left(number)
                self._alarms.set("others", _TELLS_OF_OTHERS_AFTER, lambda: self._console.say(words))
            case FrameKind.SKIPPED:
                self._console.say(messages.skipped(number, int(str(content.get("bytes", 0)))))
            case _:
                pass  # STARTED is no news to us, nor is what a later version may say.

    def _note_end(self, record: dict[str, object]) -> None:
        self.ended = True
        code, number = record.get("exit_code"), record.get("signal")
        if record.get("reason") != _LAUNCH_FAILED:
            self.ending = JobEnd(
                exit_code=code if isinstance(code, int) else None,
                signal=number if isinstance(number, int) else None,
                reason=str(record.get("reason")),
            )
