"""The line on standard error while a job waits, which is rewritten on a terminal.

Most jobs start at once: nothing is imported for a line that is not shown.
"""

from __future__ import annotations

from threading import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from threading import Timer

LINE_EVERY_S = 30.0
"""Between lines that cannot be rewritten, as in the log of a batch system."""
_ERASE = "\r\x1b[2K"


class WaitingLine:
    """The line on stderr; `width` is None if it cannot be rewritten.

    Nothing is shown for the first `delay` seconds: most jobs start at once.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        width: Callable[[], int] | None,
        delay: float,
    ) -> None:
        self._write = write
        self._width = width
        self._delay: float | None = delay
        self._timer: Timer | None = None
        self._lock = Lock()
        self._text = ""
        self._shorter: tuple[str, ...] = ()
        self._shown: str | None = None
        self._shown_at: datetime | None = None

    @property
    def rewrites(self) -> bool:
        """Whether the line disappears when the job starts."""
        return self._width is not None

    def show(self, text: str, now: datetime, *shorter: str) -> None:
        """Show `text`, unless it is shown already or the last line is too recent.

        A terminal that is too narrow for it gets the first of the `shorter` ones that fits, or as
        much of the last one as fits.
        """
        from threading import Timer

        with self._lock:
            self._text, self._shorter = text, shorter
            if self._delay is None:
                self._show(now)
            elif self._timer is None:
                self._timer = Timer(self._delay, self._show_first, (now,))
                self._timer.daemon = True
                self._timer.start()

    def clear(self) -> None:
        """Erase the line, and show nothing until the next `show`."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._width is not None and self._shown is not None:
                self._write(_ERASE)
            self._shown = None
            self._text = ""

    def _show_first(self, now: datetime) -> None:
        with self._lock:
            self._delay = None
            if self._text:
                self._show(now)

    def _show(self, now: datetime) -> None:
        before = self._shown_at
        is_due = before is None or (now - before).total_seconds() >= LINE_EVERY_S
        if self._width is not None:
            from gpulease.drawing.words import display_width, shorten

            width, texts = self._width() - 1, (self._text, *self._shorter)
            fitting = (text for text in texts if display_width(text) <= width)
            self._write(_ERASE + shorten(next(fitting, texts[-1]), width))
        elif self._text != self._shown and is_due:
            self._write(self._text + "\n")
        else:
            return
        self._shown, self._shown_at = self._text, now
