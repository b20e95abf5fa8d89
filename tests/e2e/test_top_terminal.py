"""`gpulease top` in a real terminal: what it draws, and what it leaves behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon, alive, wait_for
from e2e.users import STRANGER, daemon_for_all, needs_root
from tmux_rig import TMUX, Tmux, children, terminal

pytestmark = pytest.mark.skipif(TMUX is None, reason="needs tmux")

KEYS = "? help  q quit"
TYPIST = "while read word; do echo you typed $word; done"


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("top"), simulate="8x24G", settings={"grace": "1s"})
    yield made.start()
    made.end_all()


@pytest.fixture
def daemon(standing: Daemon) -> Iterator[Daemon]:
    """Return a daemon without jobs, which the tests here share."""
    yield standing
    standing.end_jobs()


@pytest.fixture
def busy(daemon: Daemon) -> Daemon:
    """Return a daemon with sixteen jobs that run, and three that wait."""
    for number in range(16):
        daemon.submit("--mem", "10G", "--time", "2h", "--name", f"bert-{number}", "sleep", "600")
    # A short job that is submitted before one of these is granted would overtake it.
    wait_for("they run", lambda: len(daemon.client.jobs(state="active").jobs) == 16)
    for number in range(3):
        daemon.submit("--mem", "22G", "--name", f"llm-{number}", "true")
    return daemon


Sit = Callable[..., Tmux]


@pytest.fixture
def sit(tmp_path: Path) -> Iterator[Sit]:
    """Return what opens a terminal."""
    opened = []

    def open_terminal(columns: int = 80, rows: int = 24, **environment: str) -> Tmux:
        context = terminal(tmp_path, columns, rows, **environment)
        opened.append(context)
        return context.__enter__()

    yield open_terminal
    for context in opened:
        context.__exit__(None, None, None)


def process_in(there: Tmux) -> int:
    (pid,) = wait_for("it runs", lambda: children(there.pid))
    return pid


def test_a_usual_terminal_shows_gpus_jobs_and_keys(busy: Daemon, sit: Sit) -> None:
    there = sit(80, 24)
    there.run(busy.gpulease("top"))
    lines = there.until("8 x Simulated 24G", "RUNNING 16", "bert-0", KEYS).splitlines()
    assert "8 x Simulated 24G" in lines[0]
    assert "16 running (16 yours), 3 waiting (3 yours)" in lines[0]
    assert [line.split()[0] for line in lines[1:9]] == [str(index) for index in range(8)]
    assert all("░" in line and "free" in line for line in lines[1:9])
    assert len(lines) == 24
    assert any(line.startswith("WAITING 3") for line in lines)
    assert any("llm-2" in line and "after " in line for line in lines)


def test_what_is_typed_at_once_with_the_key_of_the_filter_is_kept(busy: Daemon, sit: Sit) -> None:
    there = sit(120, 30)
    there.run(busy.gpulease("top"))
    there.until("RUNNING 16", KEYS)
    there.type("/bert-3")
    there.when(lambda screen: screen.rstrip().endswith("bert-3"), "the text is there")
    there.press("Enter")
    there.until("RUNNING 1 of 16", "only bert-3; Esc shows all")


def test_the_mouse_selects_rows_and_opens_them(busy: Daemon, sit: Sit) -> None:
    there = sit(120, 40)
    there.run(busy.gpulease("top", "--mouse"))
    screen = there.until("RUNNING 16", "bert-2", KEYS)
    row = next(y for y, line in enumerate(screen.splitlines()) if "bert-2 " in line)
    # As a terminal reports it: press and release of the left button, SGR.
    click = f"\x1b[<0;10;{row + 1}M\x1b[<0;10;{row + 1}m"
    there.type(click)
    time.sleep(0.6)  # as a slow hand does: toolkits count these as two clicks
    there.type(click)
    there.until("bert-2", "MEMORY", "Esc back")


def test_it_follows_the_size_of_the_terminal(busy: Daemon, sit: Sit) -> None:
    there = sit(200, 50)
    there.run(busy.gpulease("top"))
    there.until("── GPU 7", KEYS)
    there.resize(80, 24)
    there.when(lambda screen: "──" not in screen and KEYS in screen, "rows replace panels")
    there.resize(130, 50)
    there.until("── GPU 7", "bert-15", KEYS)
    there.resize(50, 12)
    there.when(
        lambda screen: bool(re.search(r"  16 running, 3 waiting  \d\d:(?s:.*)\? help\s*$", screen)),
        "the clock has its room, and keys are whole",
    )


def test_a_small_terminal_shows_more_jobs_than_gpus(busy: Daemon, sit: Sit) -> None:
    there = sit(50, 12)
    there.run(busy.gpulease("top"))
    lines = there.until("RUNNING 16  9 more below", "bert-6", "? help").splitlines()
    assert [line[0] for line in lines[1:3]] == ["0", "1"]
    assert sum("bert-" in line for line in lines) == 7
    there.press("Tab")
    there.when(lambda screen: screen.count("llm-") == 3 and "RUNNING" not in screen, "the queue")


def test_the_help_fits_a_usual_terminal_and_scrolls_in_a_small_one(
    daemon: Daemon, sit: Sit
) -> None:
    there = sit(80, 24)
    there.run(daemon.gpulease("top"))
    there.until("RUNNING 0", KEYS)
    there.press("?")
    lines = there.until("q                   quit", "the wheel scrolls").splitlines()
    assert lines[0].split() == ["KEYS", "MEMORY", "OF", "A", "GPU"]
    there.resize(50, 12)
    there.when(lambda screen: screen.startswith("KEYS\n") and "MEMORY" not in screen, "one column")
    there.press("End")
    there.until("the wheel scrolls")


@pytest.mark.parametrize("leave", ["C-c", signal.SIGTERM], ids=["ctrl-c", "term"])
def test_the_terminal_is_restored_however_it_ends(
    daemon: Daemon, sit: Sit, leave: str | signal.Signals
) -> None:
    there = sit()
    there.run(["stty", "-a"])
    before = there.until("speed", "extproc").partition("speed")[2].partition("extproc")[0]
    there.run(["clear"])
    there.run(daemon.gpulease("top"))
    there.until("RUNNING 0", KEYS)
    assert there.is_alternate
    if isinstance(leave, str):
        there.press(leave)
    else:
        os.kill(process_in(there), leave)
    there.when(lambda screen: KEYS not in screen, "the screen is given back")
    there.run(["clear"])
    there.run(["stty", "-a"])
    assert there.until("speed", "extproc").partition("speed")[2].partition("extproc")[0] == before
    assert not there.is_alternate


@pytest.mark.parametrize(("leave", "status"), [("q", 0), (signal.SIGTERM, 143)])
def test_its_exit_code_says_how_it_ended(
    daemon: Daemon, sit: Sit, leave: str | signal.Signals, status: int
) -> None:
    there = sit()
    there.type(" ".join(daemon.gpulease("top")) + "; echo status=$?")
    there.press("Enter")
    there.until("RUNNING 0", KEYS)
    if isinstance(leave, str):
        there.press(leave)
    else:
        os.kill(process_in(there), leave)
    there.until(f"status={status}")


@pytest.mark.parametrize("before", ["", "trap '' HUP; "], ids=["", "nohup"])
def test_closing_the_terminal_ends_it(daemon: Daemon, sit: Sit, before: str) -> None:
    there = sit()
    there.type(before + " ".join(daemon.gpulease("top")))
    there.press("Enter")
    there.until("RUNNING 0", KEYS)
    pid = process_in(there)
    there.close()
    wait_for("it has ended", lambda: not alive([pid]))


def test_attaching_shows_the_job_and_detaching_comes_back(daemon: Daemon, sit: Sit) -> None:
    job = daemon.submit("--pty", "--mem", "1G", "--name", "typist", "bash", "-c", TYPIST)
    daemon.wait_until(job, "active")
    there = sit()
    there.run(daemon.gpulease("top"))
    there.until("typist", KEYS)
    there.press("a")
    there.until(f"Attach to job {job}, typist")
    there.press("y")
    there.until(f"attached to job {job}")
    there.type("hello")
    there.press("Enter")
    there.until("you typed hello")
    there.press("C-\\")
    there.press("d")
    there.until("RUNNING 1", "typist", KEYS)
    assert daemon.job(job)["state"] == "active"
    there.press("Down")
    there.press("a", "y")
    there.until("you typed hello")
    daemon.cancel(job)
    there.until("RUNNING 0", KEYS)


def test_it_is_stopped_and_continued_as_other_programs(busy: Daemon, sit: Sit) -> None:
    there = sit()
    there.type("set -m")
    there.press("Enter")
    there.run(busy.gpulease("top"))
    there.until("RUNNING 16", KEYS)
    there.press("C-z")
    there.when(lambda screen: KEYS not in screen, "the shell is back")
    there.run(["fg"])
    there.until("RUNNING 16", "bert-0", KEYS)


def test_without_colour_the_parts_of_a_bar_still_differ(busy: Daemon, sit: Sit) -> None:
    there = sit(80, 24, NO_COLOR="1", LC_ALL="C")
    there.run(busy.gpulease("top"))
    screen = there.until("RUNNING 16", KEYS)
    assert screen.isascii()
    assert " - 8 x Simulated 24G" in screen
    assert "==" in screen
    assert ".." in screen
    colours = [f"\x1b[{code}m" for code in (*range(30, 38), *range(90, 98))]
    assert not any(colour in there.styled for colour in colours)


def counted(pid: int, what: str) -> int:
    """Return how many bytes a process has read or written, see proc_pid_io(5)."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def test_at_rest_it_writes_little_to_the_terminal(busy: Daemon, sit: Sit) -> None:
    """Over ssh each look at a quiet machine costs some hundred bytes, not a screen."""
    there = sit(80, 24, LC_ALL="C.UTF-8")
    there.run(busy.gpulease("top"))
    there.until("RUNNING 16", KEYS)
    pid = process_in(there)

    def clock() -> str:
        return there.screen.splitlines()[0].split()[-1]

    seen = {clock()}
    wait_for("it has settled", lambda: seen.add(clock()) or len(seen) > 2)
    before, seen = counted(pid, "wchar"), {clock()}
    wait_for("it looks five times", lambda: seen.add(clock()) or len(seen) > 5)
    assert counted(pid, "wchar") - before < 5 * 1500


def test_an_open_job_is_painted_only_where_it_changes(busy: Daemon, sit: Sit) -> None:
    there = sit(80, 24, LC_ALL="C.UTF-8")
    there.run(busy.gpulease("top", "--every", "1s"))
    there.until("RUNNING 16", KEYS)
    there.press("p")
    there.until("PROCESSES 1", "0%")
    pid = process_in(there)
    before, seen = counted(pid, "wchar"), {counted(pid, "rchar")}
    # Each look reads the processes.
    wait_for("it looks often", lambda: seen.add(counted(pid, "rchar")) or len(seen) > 20)
    assert counted(pid, "wchar") - before < 2000


@needs_root
def test_the_job_of_another_user_is_refused_with_a_clear_message(sit: Sit) -> None:
    ids = ["--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
    # The files of gpulease may be in a folder of root alone.
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    as_stranger = ["setpriv", *ids, *reads]
    if subprocess.run(
        [*as_stranger, sys.executable, "-c", "import gpulease"], check=False
    ).returncode:
        pytest.skip("another user cannot import gpulease")
    with daemon_for_all() as daemon:
        job = daemon.submit("--mem", "1G", "--name", "bert", "sleep", "600")
        daemon.wait_until(job, "active")
        there = sit()
        there.run([*as_stranger, *daemon.gpulease("top")])
        there.until("RUNNING 1", "bert", KEYS)
        there.press("c", "y")
        there.until(f"cannot cancel job {job}: it belongs to", "hint: only its owner", KEYS)
        daemon.cancel(job)


@pytest.mark.parametrize(
    ("environment", "redirection"), [({}, "</dev/null"), ({}, ">{out}"), ({"TERM": "dumb"}, "")]
)
def test_it_refuses_what_is_no_terminal_and_says_what_to_use(
    daemon: Daemon, sit: Sit, tmp_path: Path, environment: dict[str, str], redirection: str
) -> None:
    there = sit(**environment)
    words = redirection.format(out=tmp_path / "out")
    there.type(" ".join(daemon.gpulease("top")) + f" {words}; echo status=$?")
    there.press("Enter")
    there.until("cannot show the live view", "hint: gpulease status", "status=2")
    assert not there.is_alternate


def test_without_a_daemon_the_screen_is_not_taken(daemon: Daemon, sit: Sit, tmp_path: Path) -> None:
    there = sit()
    command = [sys.executable, "-m", "gpulease.cli", "--socket", str(tmp_path / "none"), "top"]
    there.run(command)
    there.until("cannot reach the daemon", "hint: ")
    assert not there.is_alternate


def test_without_textual_it_says_how_to_get_it(daemon: Daemon) -> None:
    program = (
        "import sys; sys.modules['textual'] = None; sys.argv[0] = 'gpulease';"
        "from gpulease.cli.app import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "top"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 125
    assert "textual is not installed" in ran.stderr
    assert f"{sys.prefix}/bin/pip install 'gpulease[top]'" in ran.stderr
