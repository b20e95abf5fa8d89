"""`gpulease` on a terminal: what is drawn there, and that it is left as it was found."""

from typing import Any

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.shim import ShimStandIn
from daemon_stand_in.terminal import Terminal, gpulease
from gpulease.wire.frames import FrameKind


def on_terminal(daemon: StandIn, *arguments: str, **options: Any) -> Terminal:
    return Terminal(gpulease(daemon.path, *arguments), **options)


def test_the_waiting_line_is_rewritten_in_place_and_wiped(
    daemon: StandIn, shim: ShimStandIn
) -> None:
    daemon.on_submit = views.job(17, position=2, reason="a reason")
    terminal = on_terminal(daemon, "run", "--mem", "4G", "true")
    terminal.read_until("2nd in line")
    daemon.put(views.job(17, position=1))
    terminal.read_until("1st in line")
    daemon.put(views.running(17, directory=str(shim.directory)))
    shim.say(FrameKind.STDOUT, b"output\n")
    shim.exit()
    assert terminal.finish() == 0
    *rewritten, rest = terminal.shown.split("\r\x1b[2K")
    assert all(len(line) < 80 and "\n" not in line for line in rewritten)
    assert rest == "job 17 · 6G\r\noutput\r\n"


def test_ctrl_c_and_typed_lines_reach_the_job(daemon: StandIn, shim: ShimStandIn) -> None:
    daemon.on_submit = views.running(17, directory=str(shim.directory))
    terminal = on_terminal(daemon, "run", "--no-pty", "--mem", "4G", "cat")
    shim.until(lambda: shim.hello is not None)
    terminal.type(b"yes\n")
    shim.until(lambda: shim.stdin == b"yes\n")
    terminal.type(b"\x03")
    shim.until(lambda: shim.signals == [2])
    terminal.type(b"\x04")
    shim.until(lambda: shim.stdin_ended)
    shim.exit(signal=2)
    assert terminal.finish() == 130


def test_a_terminal_gets_colour_and_no_color_takes_it_away(daemon: StandIn) -> None:
    daemon.status = views.busy_status()
    coloured = on_terminal(daemon, "status")
    assert coloured.finish() == 0
    plain = on_terminal(daemon, "status", NO_COLOR="1")
    assert plain.finish() == 0
    assert "\x1b[" in coloured.shown
    assert "\x1b[" not in plain.shown
    assert all(len(line) <= 80 for line in plain.shown.splitlines())
