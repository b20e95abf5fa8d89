"""`gpulease status --watch`: in place on a terminal, one page after another in a pipe."""

import os
import re
import signal
import termios
from pathlib import Path

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.terminal import Terminal, gpulease, ran, started

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def daemon(daemon: StandIn) -> StandIn:
    daemon.status = views.busy_status()
    return daemon


def watching(daemon: StandIn, *line: str) -> Terminal:
    terminal = Terminal(gpulease(daemon.path, "status", "--watch", *line), LANG="C.UTF-8")
    terminal.read_until("WAITING")
    return terminal


def echoes(terminal: Terminal) -> bool:
    return bool(terminal.attributes[3] & termios.ECHO)


@pytest.mark.parametrize("keys", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_ends_it_and_gives_the_terminal_back(daemon: StandIn, keys: bytes) -> None:
    terminal = watching(daemon)
    assert ENTER in terminal.shown and not echoes(terminal)
    terminal.type(b"x" + keys)
    assert terminal.finish() == 0
    assert terminal.shown.endswith(LEAVE)
    assert terminal.after == terminal.found


def test_a_signal_ends_it_as_that_signal_and_gives_the_terminal_back(daemon: StandIn) -> None:
    terminal = watching(daemon)
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.finish() == 128 + signal.SIGTERM
    assert terminal.shown.endswith(LEAVE)
    assert terminal.after == terminal.found


def test_only_lines_that_changed_are_written_again(daemon: StandIn) -> None:
    terminal = watching(daemon, "1s")
    before = len(terminal.shown)
    daemon.status.jobs[0].name = "another"
    terminal.read_until("another", after=before)
    written = terminal.shown[before:]
    assert "resnet" not in written and "WAITING" not in written
    assert "\x1b[2J" not in written
    terminal.type(b"q")
    assert terminal.finish() == 0


def test_another_size_is_used_at_once(daemon: StandIn) -> None:
    terminal = watching(daemon, "600s")
    before = len(terminal.shown)
    terminal.resize(16, 70)
    os.kill(terminal.pid, signal.SIGWINCH)
    terminal.read_until("\x1b[?2026l", after=before)
    rows = [int(row) for row in re.findall(r"\x1b\[(\d+)H", terminal.shown[before:])]
    assert "\x1b[2J" in terminal.shown[before:] and max(rows) <= 16
    terminal.type(b"q")
    assert terminal.finish() == 0


def test_while_the_daemon_is_away_the_last_page_stays_with_a_note(daemon: StandIn) -> None:
    terminal = watching(daemon, "1s")
    terminal.resize(24, 50)
    daemon.close()
    terminal.read_until("cannot reach the daemon")
    # The terminal does not wrap: what is longer would overwrite the last column.
    note = terminal.shown.rpartition("since ")[2]
    terminal.read_until("\x1b", after=len(terminal.shown) - len(note))
    note = terminal.shown.rpartition("since ")[2].partition("\x1b")[0]
    assert len(f"since {note}") == 50 and note.endswith("…")
    before = len(terminal.shown)
    daemon.status.jobs[0].name = "another"
    daemon.open()
    terminal.read_until("another", after=before)
    terminal.type(b"q")
    assert terminal.finish() == 0


def test_without_a_first_answer_it_fails_as_status_does(tmp_path: Path) -> None:
    terminal = Terminal(gpulease(tmp_path / "none", "status", "--watch"))
    assert terminal.finish() == 125
    assert ENTER not in terminal.shown


def test_a_pipe_gets_one_page_after_another(daemon: StandIn) -> None:
    with started(daemon.path, "status", "--watch", "1s", text=True) as process:
        assert process.stdout is not None
        seen = 0
        for row in process.stdout:
            seen += row.startswith("lab7")
            if seen == 2:
                break
        process.stdout.close()
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("line", "words"), [(["--watch", "--json"], "as JSON"), (["--watch", "soon"], "'soon'")]
)
def test_what_cannot_be_watched_is_refused(daemon: StandIn, line: list[str], words: str) -> None:
    done = ran(daemon.path, "status", *line)
    assert done.returncode == 2 or done.returncode == 125
    assert words in done.stderr and not done.stdout
