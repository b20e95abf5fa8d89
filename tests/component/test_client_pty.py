"""`run` and `attach` on a terminal, against a shim that says what a test tells it to."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.shim import ShimStandIn
from daemon_stand_in.terminal import Terminal, gpulease, ran, started
from goldens import mentions
from gpulease.cli.signals import DEADLY, name_of
from gpulease.wire.frames import FrameKind
from gpulease.wire.jobs import JobView

Sit = Callable[..., Terminal]


@pytest.fixture
def sit(daemon: StandIn, shim: ShimStandIn) -> Iterator[Sit]:
    """Return what opens a terminal with `gpulease` on it, whose job runs on a terminal."""
    opened: list[Terminal] = []
    daemon.on_submit = active(shim)
    daemon.jobs[17] = daemon.on_submit

    def sit_down(*arguments: str, **options: Any) -> Terminal:
        opened.append(Terminal(gpulease(daemon.path, *arguments), **options))
        return opened[-1]

    yield sit_down
    for terminal in opened:
        if terminal.status is None:
            os.kill(terminal.pid, signal.SIGKILL)
            terminal.hang_up()


def active(shim: ShimStandIn, **changed: Any) -> JobView:
    return views.running(17, directory=str(shim.directory), **({"terminal": True} | changed))


def test_the_request_describes_the_terminal(sit: Sit, daemon: StandIn, shim: ShimStandIn) -> None:
    terminal = sit("run", "--mem", "4G", "true", size=(31, 97))
    shim.exit()
    assert terminal.finish() == 0
    asked = daemon.submitted[0].terminal
    assert asked is not None
    assert (asked.rows, asked.columns, asked.stderr) == (31, 97, True)
    *flags, characters = terminal.found
    assert asked.attributes == [*flags, *(ord(each) for each in characters)]
    assert shim.hello == {"role": "attach", "window": {"rows": 31, "columns": 97}}
    assert "PYTHONUNBUFFERED" not in daemon.submitted[0].environment


def test_without_a_pty_python_is_kept_from_holding_its_output(
    sit: Sit, daemon: StandIn, shim: ShimStandIn
) -> None:
    daemon.on_submit = daemon.jobs[17] = active(shim, terminal=False)
    terminal = sit("run", "--no-pty", "--mem", "4G", "true")
    shim.exit()
    assert terminal.finish() == 0
    assert daemon.submitted[0].terminal is None
    assert daemon.submitted[0].environment["PYTHONUNBUFFERED"] == "1"


def test_every_key_arrives_as_it_was_typed(sit: Sit, shim: ShimStandIn) -> None:
    terminal = sit("run", "--mem", "4G", "cat")
    terminal.until(lambda: terminal.is_raw)
    keys = bytes(range(256)).replace(b"\x1c", b"") + b"\x1c\x1c" + b"\r\n\x03x\x04\x1a\x11\x13"
    terminal.type(keys)
    wanted = keys.replace(b"\x1c\x1c", b"\x1c")
    shim.until(lambda: len(shim.stdin) >= len(wanted))
    assert shim.stdin == wanted
    assert shim.signals == []
    shim.exit()
    assert terminal.finish() == 0


def exits(shim: ShimStandIn, terminal: Terminal) -> None:
    shim.exit(code=3)


def is_killed(shim: ShimStandIn, terminal: Terminal) -> None:
    shim.exit(signal=9)


def loses_its_shim(shim: ShimStandIn, terminal: Terminal) -> None:
    shim.hang_up()


def talks_nonsense(shim: ShimStandIn, terminal: Terminal) -> None:
    shim.say(FrameKind.STDOUT, b"\x1b[?1049h")
    assert shim._link is not None
    shim._link.sendall(b"\xff" * 64)


def is_refused(shim: ShimStandIn, terminal: Terminal) -> None:
    shim.tell(FrameKind.REFUSED, message="this job is someone else's")


def is_detached_from(shim: ShimStandIn, terminal: Terminal) -> None:
    terminal.type(b"\x1cd")


def gets_sighup(shim: ShimStandIn, terminal: Terminal) -> None:
    os.kill(terminal.pid, signal.SIGHUP)


def gets_sigterm(shim: ShimStandIn, terminal: Terminal) -> None:
    os.kill(terminal.pid, signal.SIGTERM)
    shim.until(lambda: shim.signals == [signal.SIGTERM])
    shim.exit(signal=15)


def is_stopped_where_nobody_continues_it(shim: ShimStandIn, terminal: Terminal) -> None:
    shim.tell(FrameKind.SUSPENDED, signal=20)
    shim.until(lambda: shim.signals == [signal.SIGCONT])
    terminal.until(lambda: terminal.is_raw)
    shim.exit()


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (exits, 3),
        (is_killed, 137),
        (loses_its_shim, 125),
        (talks_nonsense, 125),
        (is_refused, 125),
        (is_detached_from, 0),
        (gets_sighup, 129),
        (gets_sigterm, 143),
        (is_stopped_where_nobody_continues_it, 0),
    ],
)
def test_the_terminal_is_left_as_it_was_found(
    ending: Callable[[ShimStandIn, Terminal], None],
    status: int,
    sit: Sit,
    daemon: StandIn,
    shim: ShimStandIn,
) -> None:
    terminal = sit("run", "--mem", "4G", "true")
    terminal.until(lambda: terminal.is_raw)
    daemon.put(replace(active(shim), state="ended", outcome="lost", exit_status=None))
    ending(shim, terminal)
    assert terminal.finish() == status
    assert terminal.after == terminal.found
    assert daemon.cancelled == []


def test_what_a_job_left_switched_on_is_switched_off_on_detaching(
    sit: Sit, shim: ShimStandIn
) -> None:
    terminal = sit("run", "--mem", "4G", "cat")
    terminal.until(lambda: terminal.is_raw)
    shim.say(FrameKind.STDOUT, b"\x1b[?1049h\x1b[?25l~")
    terminal.read_until("~")
    terminal.type(b"\x1cd")
    assert terminal.finish() == 0
    assert "~\x1b[?25h\x1b[?1049l\x1b[0m\r\ngpulease: detached" in terminal.shown


def test_the_first_detach_key_says_what_it_waits_for(sit: Sit, shim: ShimStandIn) -> None:
    terminal = sit("run", "--mem", "4G", "cat")
    terminal.until(lambda: terminal.is_raw)
    shim.say(FrameKind.STDOUT, b"text")
    terminal.read_until("text")
    terminal.type(b"a\x1c")
    terminal.read_until("text\r\ngpulease: d ")
    shim.until(lambda: shim.stdin == b"a")
    terminal.type(b"b")
    shim.until(lambda: shim.stdin == b"a\x1cb")
    shim.exit()
    assert terminal.finish() == 0


def test_other_detach_keys_can_be_chosen_or_none(sit: Sit, shim: ShimStandIn) -> None:
    terminal = sit("attach", "17", GPULEASE_DETACH_KEYS="ctrl-p,ctrl-q")
    terminal.read_until("Ctrl-p Ctrl-q")
    terminal.until(lambda: terminal.is_raw)
    terminal.type(b"\x1cd\x10\x11")
    assert terminal.finish() == 0
    shim.until(lambda: shim.stdin == b"\x1cd")


def test_an_option_beats_the_environment_for_detach_keys(sit: Sit, shim: ShimStandIn) -> None:
    keys = ("--detach-keys", "none")
    terminal = sit("run", *keys, "--mem", "4G", "cat", GPULEASE_DETACH_KEYS="ctrl-p,ctrl-q")
    terminal.until(lambda: terminal.is_raw)
    terminal.type(b"\x10\x11\x1cd")
    shim.until(lambda: shim.stdin == b"\x10\x11\x1cd")
    shim.exit()
    assert terminal.finish() == 0


def test_a_new_size_is_passed_on(sit: Sit, shim: ShimStandIn) -> None:
    terminal = sit("run", "--mem", "4G", "cat")
    terminal.until(lambda: terminal.is_raw)
    terminal.resize(50, 132)
    shim.until(lambda: shim.windows and shim.windows[-1] == (50, 132))
    shim.exit()
    assert terminal.finish() == 0


def test_what_gpulease_says_is_on_a_line_of_its_own(sit: Sit, shim: ShimStandIn) -> None:
    terminal = sit("run", "--mem", "4G", "true")
    terminal.until(lambda: terminal.is_raw)
    shim.say(FrameKind.STDOUT, b"47%")
    shim.tell(FrameKind.STOPPING, reason="time_limit")
    shim.tell(FrameKind.SKIPPED, bytes=4096)
    shim.exit(signal=15, reason="time_limit")
    assert terminal.finish() == 124
    # A message that is wider than the terminal continues, indented, on the next line.
    _, own, stopping, skipped, end = terminal.shown.replace("\r\n  ", " ").split("\r\n")
    assert max(map(len, terminal.shown.split("\r\n"))) <= 80
    assert (own, end) == ("47%", "")
    assert stopping.startswith("gpulease: ") and "job 17" in stopping
    assert skipped.startswith("gpulease: ") and mentions(skipped, "4K", "gpulease logs 17")


def test_it_says_that_processes_are_left_when_they_stay(sit: Sit, shim: ShimStandIn) -> None:
    terminal = sit("run", "--mem", "4G", "true")
    shim.tell(FrameKind.MAIN_EXITED, exit_code=0)
    terminal.read_until("gpulease: ")
    terminal.read_until("job 17")
    shim.exit()
    assert terminal.finish() == 0


def test_a_demoted_terminal_watches_and_leaves_by_ctrl_c(sit: Sit, shim: ShimStandIn) -> None:
    terminal = sit("run", "--mem", "4G", "cat")
    terminal.until(lambda: terminal.is_raw)
    shim.tell(FrameKind.WATCHING)
    terminal.read_until("gpulease: ")
    terminal.read_until("job 17")
    terminal.resize(9, 9)
    terminal.type(b"in vain\r")
    shim.say(FrameKind.STDOUT, b"still shown")
    terminal.read_until("still shown")
    terminal.type(b"\x03")
    assert terminal.finish() == 0
    shim.until(lambda: shim.gone)
    assert (shim.stdin, shim.signals) == (b"", [])
    assert (9, 9) not in shim.windows


def test_attach_has_a_full_screen_drawn_anew(sit: Sit, shim: ShimStandIn) -> None:
    terminal = sit("attach", "17", size=(31, 97))
    shim.until(lambda: shim.signals == [signal.SIGWINCH])
    assert shim.hello == {"role": "attach", "window": {"rows": 31, "columns": 97}}
    shim.exit(code=4)
    assert terminal.finish() == 4


def test_a_job_on_pipes_hears_ctrl_c_and_reads_nothing(
    sit: Sit, daemon: StandIn, shim: ShimStandIn
) -> None:
    daemon.jobs[17] = active(shim, terminal=False)
    terminal = sit("attach", "17")
    shim.tell(FrameKind.WATCHING)
    terminal.read_until("job 17")
    terminal.read_until("Ctrl-\\ d")
    shim.say(FrameKind.STDOUT, b"one\ntwo\n")
    terminal.read_until("one\r\ntwo\r\n")
    terminal.type(b"typed\r\x04\x03")
    shim.until(lambda: shim.signals == [signal.SIGINT])
    terminal.type(b"\x1cd")
    assert terminal.finish() == 0
    assert (shim.stdin, shim.stdin_ended) == (b"", False)
    assert terminal.after == terminal.found


def test_attach_leaves_on_sigterm_and_the_job_goes_on(
    sit: Sit, daemon: StandIn, shim: ShimStandIn
) -> None:
    terminal = sit("attach", "17")
    terminal.until(lambda: terminal.is_raw)
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.finish() == 143
    assert signal.SIGTERM not in shim.signals
    assert daemon.cancelled == []
    assert terminal.after == terminal.found


@pytest.mark.parametrize("line", [("run", "--mem", "4G", "cat"), ("attach", "17")], ids="-".join)
@pytest.mark.parametrize("signum", [DEADLY[0], DEADLY[-1]], ids=name_of)
def test_what_would_kill_the_command_at_once_leaves_no_raw_terminal(
    sit: Sit, daemon: StandIn, shim: ShimStandIn, line: tuple[str, ...], signum: signal.Signals
) -> None:
    terminal = sit(*line)
    shim.say(FrameKind.STDOUT, b"\x1b[?1049h")
    terminal.read_until("\x1b[?1049h")
    assert terminal.is_raw
    os.kill(terminal.pid, signum)
    terminal.finish()
    assert terminal.status == -signum
    assert terminal.after == terminal.found
    assert "\x1b[?1049l" in terminal.shown
    assert daemon.cancelled == []
    assert signum not in shim.signals


def test_attach_to_a_waiting_job_that_is_given_up_leaves_it_in_line(
    sit: Sit, daemon: StandIn
) -> None:
    daemon.jobs[17] = views.job(17, position=2)
    terminal = sit("attach", "17")
    terminal.read_until("2nd in line")
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    assert daemon.cancelled == []
    assert "job 17" in terminal.shown.rpartition("2nd in line")[2]


@pytest.mark.parametrize("leaves", [True, False])
def test_the_detach_keys_leave_a_waiting_job_in_the_queue(
    sit: Sit, daemon: StandIn, leaves: bool
) -> None:
    daemon.on_submit = daemon.jobs[17] = views.job(17, position=2)
    terminal = sit("run", "--mem", "4G", "true")
    terminal.read_until("2nd in line")
    terminal.type(b"\x1c")
    terminal.until(lambda: terminal.is_raw)
    terminal.type(b"d" if leaves else b"x")
    assert terminal.finish() == (0 if leaves else 131)
    assert daemon.cancelled == ([] if leaves else [17])
    assert ("stays in the queue: gpulease attach 17" in terminal.shown) is leaves
    assert terminal.after == terminal.found


def test_attach_passes_a_pipe_to_a_terminal_and_warns(daemon: StandIn, shim: ShimStandIn) -> None:
    daemon.jobs[17] = active(shim)
    process = started(daemon.path, "attach", "17")
    assert process.stdin is not None
    process.stdin.write(b"piped\x1cd")
    process.stdin.close()
    process.stdin = None
    shim.until(lambda: shim.stdin_ended)
    shim.exit()
    _, err = process.communicate(timeout=20)
    assert shim.stdin == b"piped\x1cd"
    assert err.startswith(b"gpulease: ") and err.count(b"\n") == 1 and b"job 17" in err


def test_a_hold_has_nothing_to_attach_to(daemon: StandIn) -> None:
    daemon.jobs[17] = views.running(17, kind="hold")
    done = ran(daemon.path, "attach", "17")
    assert done.returncode == 125
    assert "job 17" in done.stderr


def test_a_stranger_is_told_whose_it_is(daemon: StandIn, shim: ShimStandIn) -> None:
    daemon.jobs[17] = active(shim)
    process = started(daemon.path, "attach", "17", stdin=subprocess.DEVNULL)
    shim.tell(FrameKind.REFUSED, message="this job is someone else's")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 125
    assert b"job 17: this job is someone else's\n\nhint: " in err


@pytest.mark.parametrize(
    ("changed", "said", "status"),
    [
        ({"exit_status": 0}, "exit status 0", 0),
        ({"outcome": "signaled", "exit_status": 137}, "SIGKILL", 137),
        ({"outcome": "time_limit", "exit_status": None}, "4h", 124),
        ({"outcome": "cancelled", "exit_status": None}, "cancelled", 143),
        ({"outcome": "lost", "exit_status": None, "reason": "its shim died"}, "its shim died", 125),
    ],
)
def test_an_ended_job_is_told_of(
    changed: dict[str, Any], said: str, status: int, daemon: StandIn
) -> None:
    daemon.jobs[17] = views.over(17, **changed)
    done = ran(daemon.path, "attach", "17")
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "gpulease logs 17" in done.stderr


def test_a_reader_that_leaves_attach_costs_the_job_nothing(
    daemon: StandIn, shim: ShimStandIn
) -> None:
    daemon.jobs[17] = active(shim)
    receiver, sender = os.pipe()
    os.close(receiver)
    process = started(daemon.path, "attach", "17", stdin=subprocess.DEVNULL, stdout=sender)
    os.close(sender)
    shim.say(FrameKind.STDOUT, b"text")
    process.communicate(timeout=20)
    assert process.returncode == 141
    assert signal.SIGPIPE not in shim.signals


def test_a_shell_without_a_terminal_is_refused(daemon: StandIn) -> None:
    done = ran(daemon.path, "run", "--shell")
    assert done.returncode == 2
    assert re.match(r".+\n\nhint: .*--pty", done.stderr)
    assert daemon.submitted == []


def test_a_pty_can_be_asked_for_where_there_is_none(daemon: StandIn, shim: ShimStandIn) -> None:
    daemon.on_submit = active(shim)
    process = started(daemon.path, "run", "--pty", "--mem", "4G", "--", sys.executable, "-c", "")
    shim.say(FrameKind.STDOUT, b"on a terminal\r\n")
    shim.say(FrameKind.STDERR, b"apart\n")
    shim.exit()
    out, err = process.communicate(b"piped", timeout=20)
    assert (out, err) == (b"on a terminal\r\n", b"apart\n")
    asked = daemon.submitted[0].terminal
    assert asked is not None
    assert (asked.rows, asked.columns, asked.attributes, asked.stderr) == (24, 80, None, False)
