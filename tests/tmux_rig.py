"""A real terminal for full-screen programs: tmux, with a separate server for each test."""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from daemon_rig import wait_for

TMUX = shutil.which("tmux")


class Tmux:
    """One terminal with a shell; what the shell runs is typed."""

    def __init__(self, folder: Path, columns: int, rows: int, **environment: str) -> None:
        assert TMUX is not None
        self._command = [TMUX, "-u", "-f", "/dev/null", "-S", str(folder / "tmux")]
        shell = ["env", f"HOME={folder}", "PS1=$ ", *(f"{k}={v}" for k, v in environment.items())]
        size = ["-x", str(columns), "-y", str(rows)]
        self._tmux("new-session", "-d", *size, " ".join([*map(_quoted, shell), "sh"]))

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            [*self._command, *words], check=True, capture_output=True, text=True, timeout=120
        )
        return done.stdout

    def run(self, command: Sequence[str]) -> None:
        """Type a command line."""
        self._tmux("send-keys", "-l", " ".join(map(_quoted, command)))
        self.press("Enter")

    def press(self, *keys: str) -> None:
        """Press keys, by the names that tmux has for them."""
        self._tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        """Type text."""
        self._tmux("send-keys", "-l", text)

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    @property
    def screen(self) -> str:
        """What is shown."""
        return self._tmux("capture-pane", "-p")

    @property
    def styled(self) -> str:
        """What is shown, with the escape sequences of colours."""
        return self._tmux("capture-pane", "-p", "-e")

    @property
    def is_alternate(self) -> bool:
        """Whether a program has the whole screen."""
        return self._tmux("display-message", "-p", "#{alternate_on}").strip() == "1"

    @property
    def pid(self) -> int:
        """The shell."""
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    def until(self, *texts: str) -> str:
        """Wait until all these texts are shown, and return the screen."""
        return self.when(lambda screen: all(text in screen for text in texts), " and ".join(texts))

    def when(self, condition: Callable[[str], bool], what: str) -> str:
        screens: list[str] = []

        def shown() -> bool:
            screens[:] = [self.screen]
            return condition(screens[0])

        try:
            wait_for(what, shown)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{''.join(screens)}") from None
        return screens[0]

    def close(self) -> None:
        subprocess.run([*self._command, "kill-server"], check=False, capture_output=True)


@contextmanager
def terminal(folder: Path, columns: int = 80, rows: int = 24, **environment: str) -> Iterator[Tmux]:
    """Yield a terminal that is closed afterwards."""
    made = Tmux(folder, columns, rows, **environment)
    try:
        yield made
    finally:
        made.close()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that live."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields and int(fields[1]) == pid:
            found.append(int(entry.name))
    return found


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
