"""The widget that every part of `gpulease top` is made of: lines of styled text.

Textual's own widgets render and measure more than this view needs twice a second, and write more to
the terminal. This one compares what it shows with what it should show, and repaints only lines
that differ, up to the last cell that differs.
"""

import re
from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from gpulease.cli.tables import COLOURS
from gpulease.cli.top.text import Line, Terminal, ascii_only, fitted, plain, width_of

_STYLES = {
    "title": Style(bold=True),
    "heading": Style(bold=True, dim=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red"),
    "used": Style(color="cyan"),
    "leased": Style(color="blue"),
    "unmanaged": Style(color="red"),
    "free": Style(dim=True),
    "closed": Style(dim=True),
    "cursor": Style(reverse=True),
    "keys": Style(reverse=True),
}
_STYLES |= {
    # SGR 30 to 37 are the colours 0 to 7, and 90 to 97 the bright ones, 8 to 15.
    name: Style(color=f"color({int(code) % 10 + 8 * (code >= '9')})")
    for name, code in COLOURS.items()
    if name.startswith("owner")
}
_STYLES |= {
    f"{name}-name": style + Style(bold=True)
    for name, style in _STYLES.items()
    if name.startswith("owner") or name == "used"
}
_PLAIN_STYLES = {
    name: Style(bold=style.bold, dim=style.dim, reverse=style.reverse)
    for name, style in _STYLES.items()
}


class Lines(Widget):
    """Shows lines, cut or padded to its width."""

    DEFAULT_CSS = "Lines { height: 1; }"
    EMPTY: Line = ()

    def __init__(self, terminal: Terminal, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._terminal = terminal
        self._lines: list[Line] = []
        self._strips: dict[int, Strip] = {}
        self._palette = _STYLES if terminal.colour else _PLAIN_STYLES

    @property
    def lines(self) -> list[str]:
        """What is shown, without styles."""
        return [plain(line) for line in self._lines]

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines, and repaint what differs from those before."""
        before, self._lines = self._lines, list(lines)
        width = self.size.width
        regions = []
        for y in range(max(len(before), len(self._lines))):
            old = before[y] if y < len(before) else self.EMPTY
            new = self._lines[y] if y < len(self._lines) else self.EMPTY
            if old != new:
                self._strips.pop(y, None)
                regions.append(Region(0, y, min(width, last_difference(old, new)), 1))
        if regions:
            self.refresh(*regions)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of some lines; Textual calls this for what has to be painted."""
        return [
            self._strip(y).crop(crop.x, crop.x + crop.width)
            for y in range(crop.y, crop.y + crop.height)
        ]

    def _strip(self, y: int) -> Strip:
        width = self.size.width
        strip = self._strips.get(y)
        if strip is None or strip.cell_length != width:
            line = fitted(self._lines[y] if y < len(self._lines) else self.EMPTY, width)
            segments = [Segment(self._text(text), self._palette.get(style)) for text, style in line]
            strip = self._strips[y] = Strip(segments, width)
        return strip

    def _text(self, text: str) -> str:
        return text if self._terminal.utf8 else ascii_only(text)


def last_difference(one: Line, other: Line) -> int:
    """Return the column after which two lines are equal."""
    ends = width_of(one), width_of(other)
    if ends[0] != ends[1]:
        return max(ends)
    end = ends[0]
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        end -= width_of((left,))
    return end


_SGR = re.compile(r"\x1b\[([0-9;]*)m")
_BY_CODE = {code: name for name, code in COLOURS.items()}


def styled(text: str) -> list[Line]:
    """Return the lines of a page that `tables.draw` has coloured."""
    return [_styled_line(line) for line in text.splitlines()]


def _styled_line(line: str) -> Line:
    first, *rest = _SGR.split(line)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    spans = ((first, ""), *((piece, _BY_CODE.get(code, "")) for code, piece in pairs))
    return tuple(span for span in spans if span[0])
