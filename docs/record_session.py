"""Record sessions on simulated GPUs as docs/NAME.svg: the pictures of the README and of pages.

The daemon, the commands and their pseudo-terminals are real; the script only types. All commands
run as the caller. Root can give two users, who must be able to read this checkout and its Python:

    python docs/record_session.py --users alice bob

The picture plays once. A viewer that does not animate SVG shows the last screen.
"""

import argparse
import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from gpulease import Client

DOCS = Path(__file__).parent
COLUMNS, ROWS = 96, 40

JOBS = {
    "train.py": """
import time

memory = bytearray(900 << 20)  # on simulated GPUs, resident memory stands in for GPU memory
for epoch, loss in enumerate((0.917, 0.486, 0.274), start=1):
    time.sleep(0.6)
    print(f"epoch {epoch}/3  loss {loss}")
""",
    "sweep.py": """
import time

memory = bytearray(2500 << 20)
time.sleep(120)
""",
}

SESSIONS = {
    "session": (
        (0, "gpulease run --mem 4G train.py"),
        (1, "gpulease run -d --mem 6G --time 4h --name sweep-1 sweep.py"),
        (1, "gpulease run -d --mem 5G --time 2h --name sweep-2 sweep.py"),
        (0, "gpulease run -d --mem 4G train.py"),
        (0, "gpulease status"),
    ),
    "waiting": (
        (1, "gpulease run -d --mem 6G --time 4h --name sweep-1 sweep.py"),
        (1, "gpulease run -d --mem 5G --time 2h --name sweep-2 sweep.py"),
        (0, "gpulease run -d --mem 4G --name bert train.py"),
        (0, "gpulease show bert"),
        (0, "gpulease edit bert --mem 3G"),
        (0, "gpulease list"),
    ),
    "over-lease": ((0, "gpulease run --mem 2G sweep.py"), (0, "gpulease show last")),
    "top": (
        (1, "gpulease run -d --mem 6G --time 4h --name sweep-1 sweep.py"),
        (0, "gpulease run -d --mem 4G --time 2h --name vit sweep.py"),
        (1, "gpulease run -d --mem 3G --time 2h --name sweep-2 sweep.py"),
        (0, "gpulease run -d --mem 6G --name bert train.py"),
        (0, "gpulease run -d --mem 5G --name eval train.py"),
        (0, "gpulease top"),
    ),
}
"""The user, 0 or 1, and the command, of each picture; `top` draws its own."""

TOP = {"TEXTUAL_SCREENSHOT": "20", "TEXTUAL_SCREENSHOT_FILENAME": "top.svg"}
"""`top` writes what it shows after 20 seconds, and ends."""
MAY_FAIL = frozenset({"gpulease run --mem 2G sweep.py"})
SETTINGS = 'overuse_grace = "5s"\n'

TYPING_S = 0.04
"""For one character."""
PAUSE_S = 1.0
"""Before a command is typed."""
LONGEST_S = 1.2
"""A longer pause in the output is cut to this."""
END_WITHIN_S = 10.0
"""For the jobs to end after the session."""


class Style(NamedTuple):
    """How a character looks."""

    colour: str = "text"
    bold: bool = False
    dim: bool = False


class Cell(NamedTuple):
    """One place on the screen."""

    character: str = " "
    style: Style = Style()


Row = tuple[Cell, ...]

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_CHANGES: dict[int, dict[str, Any]] = {
    0: Style()._asdict(),
    1: {"bold": True},
    2: {"dim": True},
    22: {"bold": False, "dim": False},
    39: {"colour": "text"},
}
"""What the numbers of SGR change, other than colours."""
_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b.")


class Screen:
    """What a terminal shows: as much of ECMA-48 as the command uses."""

    def __init__(self) -> None:
        self._cells = [[Cell()] * COLUMNS for _ in range(ROWS)]
        self._row = self._column = 0
        self._style = Style()

    def rows(self) -> list[Row]:
        return [tuple(row) for row in self._cells]

    def feed(self, text: str) -> None:
        at = 0
        for sequence in _SEQUENCE.finditer(text):
            self._print(text[at : sequence.start()])
            self._obey(sequence[1] or "", sequence[2] or "")
            at = sequence.end()
        self._print(text[at:])

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._row += 1
            elif character == "\r":
                self._column = 0
            elif character >= " ":
                self._put(character)
            if self._row == ROWS:
                sys.exit(f"the session does not fit on {ROWS} rows")

    def _put(self, character: str) -> None:
        if self._column == COLUMNS:
            self._row, self._column = self._row + 1, 0
        self._cells[self._row][self._column] = Cell(character, self._style)
        self._column += 1

    def _obey(self, parameters: str, final: str) -> None:
        numbers = [int(number or 0) for number in parameters.lstrip("?").split(";")]
        if final == "m":
            for number in numbers:
                self._style = _styled(self._style, number)
        elif final == "K":
            self._cells[self._row][self._column :] = [Cell()] * (COLUMNS - self._column)
        elif final == "A":
            self._row = max(0, self._row - (numbers[0] or 1))
        elif final == "J":
            self._cells[self._row + 1 :] = [
                [Cell()] * COLUMNS for _ in self._cells[self._row + 1 :]
            ]


def _styled(style: Style, number: int) -> Style:
    if number in _CHANGES:
        return style._replace(**_CHANGES[number])
    for first in (30, 90):
        if first <= number < first + len(_COLOURS):
            return style._replace(colour=_COLOURS[number - first])
    return style


@dataclass(frozen=True)
class Shown:
    """A row of the screen, from one moment to another, or to the end."""

    row: int
    cells: Row
    begin: float
    end: float | None = None


@dataclass
class Recording:
    """The rows that a screen has shown, on a clock that shortens pauses."""

    screen: Screen = field(default_factory=Screen)
    shown: list[Shown] = field(default_factory=list)
    now: float = 0.0
    last: float = field(default_factory=time.monotonic)

    def type(self, text: str, after_s: float) -> None:
        time.sleep(after_s)
        self.write(text)

    def write(self, text: str) -> None:
        real = time.monotonic()
        self.now, self.last = self.now + min(real - self.last, LONGEST_S), real
        before = self.screen.rows()
        self.screen.feed(text)
        for number, (old, new) in enumerate(zip(before, self.screen.rows(), strict=True)):
            if old != new:
                self._close(number)
                self.shown.append(Shown(number, new, self.now))

    def _close(self, row: int) -> None:
        for index, each in enumerate(self.shown):
            if each.row == row and each.end is None:
                self.shown[index] = replace(each, end=self.now)


def type_and_run(recording: Recording, user: str | None, command: str, folder: Path) -> None:
    name = user or os.environ.get("USER", "you")
    recording.write(f"\x1b[32m{name}$\x1b[0m ")
    time.sleep(PAUSE_S)
    for character in [*command, "\r\n"]:
        recording.type(character, TYPING_S)
    for text in output(command.split(), user, folder):
        if command != "gpulease top":
            recording.write(text)


def output(command: Sequence[str], user: str | None, folder: Path) -> Iterator[str]:
    """Run a command on a pseudo-terminal, and yield what it writes when it writes it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(
        theirs,
        termios.TIOCSWINSZ,
        struct.pack("4H", 20 if "top" in command else ROWS, COLUMNS, 0, 0),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gpulease.cli", *command[1:]],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={
            **os.environ,
            **TOP,
            "TEXTUAL_SCREENSHOT_LOCATION": str(folder / "top"),
            "TERM": "xterm-256color",
            "VIRTUAL_ENV": sys.prefix,
        },
        user=user,
        group=user,
        extra_groups=[] if user else None,
        process_group=0,
    )
    os.close(theirs)
    decoder = codecs.getincrementaldecoder("utf-8")()
    while chunk := read(ours):
        yield decoder.decode(chunk)
    if (status := process.wait()) and " ".join(command) not in MAY_FAIL:
        sys.exit(f"{' '.join(command)} exited with {status}")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says EIO when the last writer has gone.
        return b""


# A dark terminal, whatever the theme of the page around it.
_PALETTE = {
    "text": "#d6deeb",
    "black": "#637777",
    "red": "#ff7b72",
    "green": "#7ee787",
    "yellow": "#f2cc60",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#ffffff",
}
_FONTS = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
_WIDTH, _HEIGHT, _MARGIN, _BAR = 8.4, 19, 18, 34


def svg(recording: Recording) -> str:
    last = max(each.row for each in recording.shown)
    width = round(COLUMNS * _WIDTH + 2 * _MARGIN)
    height = (last + 1) * _HEIGHT + _BAR + _MARGIN
    rows = "\n".join(drawn(each) for each in recording.shown if any_text(each.cells))
    colours = "\n".join(f".{name} {{ fill: {value}; }}" for name, value in _PALETTE.items())
    dots = "".join(
        f'<circle cx="{_MARGIN + 6 + 20 * at}" cy="17" r="6" fill="{fill}"/>'
        for at, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {box}>
<title>A session with gpulease on two simulated GPUs</title>
<style>
text {{ font: 14px {_FONTS}; }}
{colours}
.bold {{ font-weight: bold; }}
.dim {{ opacity: 0.65; }}
.gone {{ visibility: hidden; }}
@keyframes show {{ from, to {{ visibility: visible; }} }}
@keyframes hide {{ from, to {{ visibility: hidden; }} }}
@media (prefers-reduced-motion: reduce) {{ g {{ animation: none !important; }} }}
</style>
<rect width="{width}" height="{height}" rx="10" fill="#161b22" stroke="#30363d"/>
{dots}
{rows}
</svg>
"""


def any_text(cells: Row) -> bool:
    return any(cell.character != " " for cell in cells)


def drawn(shown: Shown) -> str:
    kind, animation = "", f"hide {shown.begin:.2f}s"
    if shown.end is not None:
        kind = ' class="gone"'
        animation = f"show {shown.end - shown.begin:.2f}s {shown.begin:.2f}s"
    baseline = _BAR + shown.row * _HEIGHT + 14
    runs = "".join(run(baseline, *each) for each in runs_of(shown.cells))
    return f'<g{kind} style="animation: {animation}">{runs}</g>'


def runs_of(cells: Row) -> Iterator[tuple[int, str, Style]]:
    """Yield each stretch of one style, without wide gaps: its column, its text and the style."""
    begin = 0
    for end in range(1, len(cells) + 1):
        if end == len(cells) or cells[end].style != cells[begin].style:
            text = "".join(cell.character for cell in cells[begin:end])
            for words in re.finditer(r"\S+(?: \S+)*", text):
                yield begin + words.start(), words[0], cells[begin].style
            begin = end


def run(baseline: int, column: int, text: str, style: Style) -> str:
    names = " ".join([style.colour, *["bold"] * style.bold, *["dim"] * style.dim])
    left = _MARGIN + column * _WIDTH
    # The length keeps columns in line, whatever the viewer's font is.
    return (
        f'<text class="{names}" x="{left:.1f}" y="{baseline}" '
        f'textLength="{len(text) * _WIDTH:.1f}">{escape(text)}</text>'
    )


def record(session: str, users: Sequence[str | None], folder: Path) -> Recording:
    for name, text in {**JOBS, "config.toml": SETTINGS}.items():
        (folder / name).write_text(text)
    (folder / "top").mkdir()
    (folder / "top").chmod(0o777)
    os.environ["GPULEASE_SOCKET"] = str(folder / "gpuleased.sock")
    command = [sys.executable, "-m", "gpulease.daemon", "--simulate", "2x8G"]
    command += ["--state", str(folder / "state"), "--socket", os.environ["GPULEASE_SOCKET"]]
    command += ["--config", str(folder / "config.toml")]
    recording = Recording()
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for_answer(daemon, folder / "log")
        for who, line in SESSIONS[session]:
            type_and_run(recording, users[who % len(users)], line, folder)
        cancel_all(os.environ["GPULEASE_SOCKET"])
        return recording
    finally:
        daemon.terminate()
        daemon.wait()


def wait_for_answer(daemon: subprocess.Popen[bytes], log: Path) -> None:
    command = [sys.executable, "-m", "gpulease.cli", "status"]
    while subprocess.run(command, check=False, capture_output=True).returncode:
        if daemon.poll() is not None:
            sys.exit(log.read_text())
        time.sleep(0.1)


def cancel_all(socket: str) -> None:
    """Cancel all jobs, and wait until they have ended: they would outlive the daemon."""
    client = Client(Path(socket))
    for job in client.jobs().jobs:
        client.cancel(job.id, grace=0)
    deadline = time.monotonic() + END_WITHIN_S
    while client.jobs().jobs and time.monotonic() < deadline:
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record docs/NAME.svg.")
    parser.add_argument("--users", nargs=2, default=[None], help="who types; needs root")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SESSIONS)}")
    arguments = parser.parse_args()
    for name in arguments.names or SESSIONS:
        with tempfile.TemporaryDirectory(prefix="gpulease-session-") as folder:
            Path(folder).chmod(0o755)
            recording = record(name, arguments.users, Path(folder))
            taken = Path(folder) / "top" / "top.svg"
            picture = taken.read_text(encoding="utf-8") if taken.exists() else svg(recording)
        (DOCS / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
