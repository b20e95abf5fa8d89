"""`gpulease run` and `attach` on real terminals: as if the command had been run directly."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon, alive, wait_for
from daemon_stand_in.terminal import Terminal
from goldens import mentions

Open = Callable[..., Terminal]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("d"), settings={"grace": "2s"}).start()
    yield daemon
    daemon.end_all()


@pytest.fixture
def daemon(standing: Daemon) -> Iterator[Daemon]:
    """Return a daemon without jobs, which the tests here share."""
    yield standing
    for job in standing.status()["jobs"]:
        standing.run("cancel", str(job["id"]), check=False)
        standing.wait_until(job["id"], "ended")


@pytest.fixture
def sit(daemon: Daemon, tmp_path: Path) -> Iterator[Open]:
    """Return what opens a terminal with a command of gpulease on it."""
    opened: list[Terminal] = []

    def sit_down(*arguments: str, command: list[str] | None = None, **options: Any) -> Terminal:
        there = Terminal(command or daemon.gpulease(*arguments), HOME=str(tmp_path), **options)
        opened.append(there)
        return there

    yield sit_down
    for terminal in opened:
        if terminal.status is None:
            os.kill(terminal.pid, signal.SIGKILL)
            terminal.hang_up()


def python(source: str) -> list[str]:
    return ["run", "--mem", "1G", "--", sys.executable, "-c", source]


def only_job(daemon: Daemon) -> int:
    (job,) = wait_for("a job is there", lambda: daemon.status()["jobs"])
    return int(job["id"])


def test_the_job_finds_a_terminal_of_the_same_kind_and_size(sit: Open) -> None:
    look = (
        "import os, sys, termios\n"
        "print([os.isatty(fd) for fd in (0, 1, 2)], os.get_terminal_size(), "
        "len({os.ttyname(fd) for fd in (0, 1, 2)}), termios.tcgetattr(0)[6][termios.VERASE])\n"
        "print(os.tcgetpgrp(0) == os.getpgrp(), open('/dev/tty').isatty())"
    )

    def unusual(handle: int) -> None:
        import termios

        attributes = termios.tcgetattr(handle)
        attributes[6][termios.VERASE] = b"\x08"
        termios.tcsetattr(handle, termios.TCSANOW, attributes)

    terminal = sit(*python(look), size=(33, 101), prepare=unusual)
    assert terminal.finish() == 0
    assert "[True, True, True] os.terminal_size(columns=101, lines=33) 1 b'\\x08'" in terminal.shown
    assert "True True" in terminal.shown
    assert terminal.after == terminal.found


def test_a_resized_terminal_is_resized_for_the_job(sit: Open) -> None:
    wait = (
        "import os, signal\n"
        # Not with print: a second signal may come while the first is being told.
        "tell = lambda *_: os.write(1, b'now %d %d\\n' % tuple(os.get_terminal_size()))\n"
        "signal.signal(signal.SIGWINCH, tell)\n"
        "print('ready', flush=True)\n"
        "input()"
    )
    terminal = sit(*python(wait))
    terminal.read_until("ready")
    terminal.resize(50, 132)
    terminal.read_until("now 132 50")
    terminal.type(b"\r")
    assert terminal.finish() == 0


def test_input_is_asked_for_and_echoed_once(sit: Open) -> None:
    terminal = sit(*python("name = input('name? '); print(f'hello {name}')"))
    terminal.read_until("name? ")
    terminal.type(b"adz\x7fa\r")
    assert terminal.finish() == 0
    assert terminal.shown.count("hello ada") == 1
    assert terminal.after == terminal.found


def test_ctrl_d_ends_the_input_of_the_job(sit: Open) -> None:
    terminal = sit("run", "--mem", "1G", "cat")
    terminal.until(lambda: terminal.is_raw)
    terminal.type(b"line\r")
    terminal.read_until("line\r\nline\r\n")
    terminal.type(b"\x04")
    assert terminal.finish() == 0


def test_ctrl_c_leaves_the_traceback_of_the_script(sit: Open) -> None:
    terminal = sit(*python("import time\nprint('ready', flush=True)\ntime.sleep(600)"))
    terminal.read_until("ready")
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    assert "^C" in terminal.shown
    assert "KeyboardInterrupt" in terminal.shown
    assert terminal.after == terminal.found


def test_ctrl_c_twice_cancels_a_job_that_does_not_answer(sit: Open, daemon: Daemon) -> None:
    deaf = "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint('ready', flush=True)\n"
    terminal = sit(*python(deaf + "while True: time.sleep(1)"))
    terminal.read_until("ready")
    begin = len(terminal.shown)
    terminal.type(b"\x03")
    terminal.read_until("^C", after=begin)
    terminal.type(b"\x03")
    assert terminal.finish() == 128 + signal.SIGTERM
    assert re.search(r"\r\ngpulease: job \d+ .+\r\n", terminal.shown)
    assert terminal.after == terminal.found


def test_ctrl_c_twice_is_left_to_a_job_that_answers(sit: Open, daemon: Daemon) -> None:
    patient = (
        "import os, signal, sys\n"
        "signal.signal(2, lambda *_: os.write(1, b'saving\\n'))\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin: break"
    )
    terminal = sit(*python(patient))
    terminal.read_until("ready")
    for _ in range(4):
        begin = len(terminal.shown)
        terminal.type(b"\x03")
        terminal.read_until("saving", after=begin)
    terminal.type(b"\r")
    assert terminal.finish() == 0


def test_the_debugger_stops_steps_and_quits(sit: Open, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\nbreakpoint()\nx = 2\nx = 3\n")
    terminal = sit("run", "--mem", "1G", "--", sys.executable, str(script))
    terminal.read_until("(Pdb) ")
    for line, answer in (("p x * 7", "7"), ("next", "x = 3"), ("p x * 7", "14")):
        begin = len(terminal.shown)
        terminal.type(line.encode() + b"\r")
        terminal.read_until(answer, after=begin + len(line))
        terminal.read_until("(Pdb) ", after=begin)
    terminal.type(b"continue\r")
    assert terminal.finish() == 0


def test_a_closed_terminal_leaves_the_job_running(sit: Open, daemon: Daemon) -> None:
    terminal = sit(*python("import sys\nprint('first', flush=True)\nsys.stdin.readline()"))
    terminal.read_until("first")
    assert terminal.hang_up() in (129, -signal.SIGHUP)
    job = only_job(daemon)
    assert daemon.job(job)["state"] == "active"
    again = sit("attach", str(job))
    again.read_until("first")
    again.type(b"\r")
    assert again.finish() == 0


def test_a_killed_run_is_found_again(sit: Open, daemon: Daemon) -> None:
    terminal = sit(*python("import sys\nprint('first', flush=True)\nsys.stdin.readline()"))
    terminal.read_until("first")
    os.kill(terminal.pid, signal.SIGKILL)
    assert terminal.finish() == 128 + signal.SIGKILL
    job = only_job(daemon)
    again = sit("attach", str(job))
    again.read_until("first")
    again.type(b"\r")
    assert again.finish() == 0


def test_the_newest_terminal_writes_and_the_other_watches(sit: Open, daemon: Daemon) -> None:
    echo = "import sys\nprint('first', flush=True)\nfor line in sys.stdin: print('got', line)"
    first = sit(*python(echo))
    first.read_until("first")
    job = only_job(daemon)
    second = sit("attach", str(job))
    first.read_until("gpulease: ")
    second.read_until("first")
    first.type(b"from the first\r")
    second.type(b"from the second\r")
    second.read_until("got from the second")
    first.read_until("got from the second")
    second.type(b"\x04")
    assert (first.finish(), second.finish()) == (0, 0)
    assert "from the first" not in first.shown + second.shown
    assert first.after == first.found


def test_who_only_watches_cannot_write(sit: Open, daemon: Daemon) -> None:
    echo = "import sys\nprint('first', flush=True)\nfor line in sys.stdin: print('got', line)"
    first = sit(*python(echo))
    first.read_until("first")
    job = only_job(daemon)
    watcher = sit("attach", "--watch", str(job))
    watcher.read_until("first")
    watcher.type(b"from the watcher\r")
    first.type(b"from the first\r")
    watcher.read_until("got from the first")
    watcher.type(b"\x03")
    assert watcher.finish() == 0
    assert watcher.after == watcher.found
    first.type(b"\x04")
    assert first.finish() == 0
    assert "from the watcher" not in first.shown


def test_a_job_on_pipes_is_interrupted_from_attach(sit: Open, daemon: Daemon) -> None:
    wait = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    job = daemon.submit("--mem", "1G", "--", sys.executable, "-c", wait)
    terminal = sit("attach", str(job))
    terminal.read_until("ready")
    terminal.type(b"typed in vain\r\x1cd")
    assert terminal.finish() == 0
    assert terminal.after == terminal.found
    again = sit("attach", str(job))
    again.read_until("ready")
    again.type(b"\x03")
    assert again.finish() == 130
    assert "KeyboardInterrupt" in again.shown
    assert again.after == again.found


def shell(daemon: Daemon, sit: Open) -> Terminal:
    """Return an interactive shell that knows the command as `gl`."""
    terminal = sit(command=["/bin/bash", "--norc", "--noprofile", "-i"])
    line = " ".join(daemon.gpulease())
    # Written so that the echo of this line is not taken for the prompt.
    terminal.type(f"gl() {{ {line} \"$@\"; }}; cd; stty -echo; PS1='[rea''dy] '\r".encode())
    terminal.read_until("[ready] ")
    return terminal


def command(terminal: Terminal, line: str, until: str) -> None:
    begin = len(terminal.shown)
    terminal.type(line.encode() + b"\r")
    terminal.read_until(until, after=begin)


def test_ctrl_z_stops_the_job_and_fg_goes_on(sit: Open, daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    echo = "for line in sys.stdin: print('got', line.strip())\n"
    script.write_text(f"import sys\nprint('first', flush=True)\n{echo}")
    terminal = shell(daemon, sit)
    command(terminal, "stty -a > before", "[ready]")
    command(terminal, f"gl run --mem 1G -- {sys.executable} {script}", "first")
    job = only_job(daemon)
    begin = len(terminal.shown)
    terminal.type(b"\x1a")
    terminal.read_until("[ready]", after=begin)
    assert f"\r\ngpulease: job {job} " in (terminal.shown)
    assert "Stopped" in terminal.shown[begin:]
    command(terminal, "stty -a > stopped; diff before stopped && echo 'as it was'", "as it was")
    pid = daemon.job(job)["pid"]
    assert stat(pid) == "T"

    terminal.type(b"fg\r")
    wait_for("the job goes on", lambda: stat(pid) != "T")
    terminal.until(lambda: terminal.is_raw)
    command(terminal, "once more", "got once more")
    command(terminal, "\x04", "[ready]")
    command(terminal, "stty -a > after; diff before after && echo 'it is'", "it is")
    terminal.type(b"exit 7\r")
    assert terminal.finish() == 7


def test_ctrl_z_stops_a_script_around_it_as_well(sit: Open, daemon: Daemon, tmp_path: Path) -> None:
    line = " ".join(daemon.gpulease("run", "--mem", "1G", "--", "sh", "-c"))
    (tmp_path / "all.sh").write_text(f"{line} 'echo first; read x; echo got $x'; echo then $?\n")
    terminal = shell(daemon, sit)
    command(terminal, "sh all.sh", "first")
    begin = len(terminal.shown)
    terminal.type(b"\x1a")
    terminal.read_until("[ready]", after=begin)
    terminal.type(b"fg\r")
    terminal.until(lambda: terminal.is_raw)
    command(terminal, "typed", "got typed")
    terminal.read_until("then 0", after=begin)
    terminal.type(b"exit\r")
    assert terminal.finish() == 0


def test_ctrl_c_ends_a_script_around_it_as_well(sit: Open, daemon: Daemon, tmp_path: Path) -> None:
    run = " ".join(daemon.gpulease("run", "--mem", "1G", "--", sys.executable, "-c"))
    job = 'import time; print("up"); time.sleep(600)'
    loop = f"for n in 1 2; do echo round $n; {run} '{job}'; done"
    (tmp_path / "all.sh").write_text(f"{loop}\necho after\n")
    terminal = shell(daemon, sit)
    command(terminal, "bash all.sh", "up")
    begin = len(terminal.shown)
    command(terminal, "\x03", "[ready] ")
    said = terminal.shown[begin:]
    assert "KeyboardInterrupt" in said
    assert "round 2" not in said
    assert "after" not in said
    command(terminal, "echo status $?", "status 130")
    terminal.type(b"exit\r")
    terminal.finish()


@pytest.mark.parametrize(
    "line",
    ["gl run --mem 1G -- true", 'eval "$(gl hold --mem 1G)"', "gl logs -f {filler}"],
    ids=["run", "hold", "logs"],
)
def test_ctrl_c_ends_a_loop_whose_command_waits(sit: Open, daemon: Daemon, line: str) -> None:
    filler = daemon.submit("--exclusive", "--gpus", "2", "--", "sh", "-c", "echo up; sleep 600")
    daemon.wait_until(filler, "active")
    terminal = shell(daemon, sit)
    until = "up\r\n" if "logs" in line else "gpulease: job "
    loop = f"for n in 1 2 3; do echo round $n; {line.format(filler=filler)}; done"
    command(terminal, loop, until)
    begin = len(terminal.shown)
    command(terminal, "\x03", "[ready] ")
    command(terminal, "echo status $?", "status 130")
    assert "round" not in terminal.shown[begin:]
    waiting = [job for job in daemon.status()["jobs"] if job["state"] == "queued"]
    assert waiting == []
    terminal.type(b"exit\r")
    terminal.finish()


def test_bg_lets_the_job_go_on_without_the_terminal(
    sit: Open, daemon: Daemon, tmp_path: Path
) -> None:
    script = tmp_path / "wait.py"
    go = tmp_path / "go"
    script.write_text(
        "import os, sys, time\n"
        "print('first', flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "print('went on', flush=True)\n"
        "print('got', sys.stdin.readline())\n"
    )
    terminal = shell(daemon, sit)
    command(terminal, f"gl run --mem 1G -- {sys.executable} {script}", "first")
    begin = len(terminal.shown)
    terminal.type(b"\x1a")
    terminal.read_until("[ready]", after=begin)
    command(terminal, "bg", "[ready]")
    go.touch()
    terminal.read_until("went on", after=begin)
    command(terminal, "echo $((6*7)) is mine", "42 is mine")
    terminal.type(b"fg\r")
    terminal.until(lambda: terminal.is_raw)
    command(terminal, "typed", "got typed")
    terminal.read_until("[ready]", after=len(terminal.shown) - 1)
    terminal.type(b"exit\r")
    assert terminal.finish() == 0


def test_ctrl_z_stops_a_job_on_pipes_too(sit: Open, daemon: Daemon, tmp_path: Path) -> None:
    terminal = shell(daemon, sit)
    command(terminal, "cd $HOME; gl run --mem 1G sleep 600 > out & sleep 0; fg", "gl run")
    job = only_job(daemon)
    pid = wait_for("it runs", lambda: daemon.job(job)["pid"])
    begin = len(terminal.shown)

    def stopped() -> bool:
        return "Stopped" in terminal.shown[begin:]

    wait_for("it is there", lambda: alive([pid]))
    terminal.type(b"\x1a")
    terminal.until(stopped)
    wait_for("the job has stopped", lambda: stat(pid) == "T")
    command(terminal, "fg", "gl run")
    wait_for("the job goes on", lambda: stat(pid) in "SR")
    terminal.type(b"\x03")
    terminal.read_until("[ready]", after=len(terminal.shown))
    wait_for("the job has ended", lambda: not alive([pid]))
    terminal.type(b"exit\r")
    terminal.finish()


def test_ctrl_z_in_attach_stops_attach_alone(sit: Open, daemon: Daemon) -> None:
    wait = "import time\nprint('first', flush=True)\ntime.sleep(600)"
    job = daemon.submit("--mem", "1G", "--", sys.executable, "-c", wait)
    terminal = shell(daemon, sit)
    command(terminal, f"gl attach {job}", "first")
    begin = len(terminal.shown)
    terminal.type(b"\x1a")
    terminal.read_until("[ready]", after=begin)
    assert f"gpulease: job {job} " in terminal.shown[begin:]
    assert stat(daemon.job(job)["pid"]) == "S"
    terminal.type(b"fg\r")
    terminal.until(lambda: terminal.is_raw)
    command(terminal, "\x1cd", f"detached from job {job}")
    terminal.read_until("[ready]", after=begin + len("[ready]"))
    terminal.type(b"exit\r")
    assert terminal.finish() == 0


@pytest.mark.parametrize("kind", ["run", "hold"])
def test_a_stopped_job_is_shown_as_suspended_until_it_goes_on(daemon: Daemon, kind: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as holder:
        try:
            if kind == "run":
                job = daemon.submit("--mem", "1G", "--", "sleep", "600")
            else:
                daemon.run("hold", "--mem", "1G", "--pid", str(holder.pid))
                job = only_job(daemon)
            pid = daemon.wait_until(job, "active")["pid"]
            assert not daemon.job(job)["suspended"]
            os.kill(pid, signal.SIGSTOP)
            wait_for("it is suspended", lambda: daemon.job(job)["suspended"])
            (listed,) = daemon.status()["jobs"]
            assert (listed["state"], listed["suspended"]) == ("active", True)
            assert " suspended " in daemon.run("list", "--state", "suspended").stdout
            assert " suspended" in daemon.run("status").stdout
            shown = daemon.run("show", str(job)).stdout
            assert "suspended" in shown
            os.kill(pid, signal.SIGCONT)
            wait_for("it goes on", lambda: not daemon.job(job)["suspended"])
            assert " suspended " not in daemon.run("list", "--state", "suspended").stdout
        finally:
            holder.kill()


def test_a_shell_has_a_lease_until_it_is_left(sit: Open, daemon: Daemon) -> None:
    terminal = sit("run", "--mem", "1G", "--shell", SHELL="/bin/sh")
    terminal.read_until("gpulease: ")
    assert re.search(r"GPU \d .*1G.*\r\n", terminal.shown)
    terminal.type(b"echo $((6*7)) $GPULEASE_MEMORY; exit 3\r")
    assert terminal.finish() == 3
    assert f"42 {1 << 30}" in terminal.shown


def test_an_ended_job_is_told_of_and_not_attached_to(sit: Open, daemon: Daemon) -> None:
    job = daemon.submit("--mem", "1G", "--", "sh", "-c", "exit 6")
    daemon.wait_until(job, "ended")
    terminal = sit("attach", str(job))
    assert terminal.finish() == 6
    assert mentions(terminal.shown, f"job {job} ", "exit status 6", f"gpulease logs {job}")


def test_redirected_errors_stay_apart(sit: Open, daemon: Daemon, tmp_path: Path) -> None:
    errors = tmp_path / "err"
    line = " ".join(daemon.gpulease("run", "--mem", "1G", "--", "sh", "-c"))
    terminal = sit(command=["/bin/sh", "-c", f"{line} 'echo out; echo err >&2' 2> {errors}"])
    assert terminal.finish() == 0
    assert terminal.shown == "out\r\n"
    assert errors.read_text() == "err\n"


def test_a_detached_job_may_have_a_terminal_too(sit: Open, daemon: Daemon) -> None:
    job = daemon.submit("--pty", "--mem", "1G", "--", "sh", "-c", "stty size; read x; exit $x")
    terminal = sit("attach", str(job), size=(30, 70))
    terminal.read_until("24 80")
    terminal.type(b"4\r")
    assert terminal.finish() == 4


def stat(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
