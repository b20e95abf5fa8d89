"""`gpulease run` and `attach` on real terminals: as if the command had been run directly."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon, alive, wait_for
from daemon_stand_in.terminal import Terminal

Open = Callable[..., Terminal]


@pytest.fixture
def daemon(shared: Daemon) -> Daemon:
    return shared


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


def test_ctrl_c_leaves_the_traceback_of_the_script(sit: Open) -> None:
    terminal = sit(*python("import time\nprint('ready', flush=True)\ntime.sleep(600)"))
    terminal.read_until("ready")
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    assert "^C" in terminal.shown
    assert "KeyboardInterrupt" in terminal.shown
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
    # Where the start is expected is sometimes known by then, and then the line begins otherwise.
    until = "up\r\n" if "logs" in line else f"job {filler + 1} "
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
    begin = len(terminal.shown)
    command(terminal, "typed", "got typed")
    terminal.read_until("[ready]", after=begin)
    terminal.type(b"exit\r")
    assert terminal.finish() == 0


def test_ctrl_z_stops_a_job_on_pipes_too(sit: Open, daemon: Daemon, tmp_path: Path) -> None:
    terminal = shell(daemon, sit)
    out = tmp_path / "out"
    line = f"gl run --mem 1G sh -c 'echo here; exec sleep 600' > {out} & sleep 0; fg"
    command(terminal, line, "gl run")
    # Before the command has its output, Ctrl-Z stops the command alone.
    wait_for("it runs", lambda: out.exists() and out.read_text())
    job = only_job(daemon)
    pid = wait_for("its start is on record", lambda: daemon.job(job)["pid"])
    begin = len(terminal.shown)

    def stopped() -> bool:
        return "Stopped" in terminal.shown[begin:]

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


def test_redirected_errors_stay_apart(sit: Open, daemon: Daemon, tmp_path: Path) -> None:
    errors = tmp_path / "err"
    line = " ".join(daemon.gpulease("run", "--mem", "1G", "--", "sh", "-c"))
    terminal = sit(command=["/bin/sh", "-c", f"{line} 'echo out; echo err >&2' 2> {errors}"])
    assert terminal.finish() == 0
    assert terminal.shown == "out\r\n"
    assert errors.read_text() == "err\n"


def stat(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
