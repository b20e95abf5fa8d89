"""A job on a pseudo-terminal: to the job it is the caller's terminal, and nothing is lost on it."""

import dataclasses
import hashlib
import json
import os
import pty
import random
import re
import signal
import string
import termios
from pathlib import Path

import pytest

from gpulease.host.launch import Launch
from gpulease.record import replace
from gpulease.shim.launch_request import TerminalSpec
from gpulease.wire.frames import FrameKind
from process_rig import (
    PATH,
    READ_STAT,
    Client,
    end,
    ephemeral_user,
    finish,
    is_alive,
    job_directory,
    output,
    python,
    shell,
    start,
    state,
    user_identity,
    wait_until,
)

PLAIN = TerminalSpec(rows=30, columns=100, attributes=None, stderr=True)
CTRL_C, CTRL_D, CTRL_Z, CTRL_BACKSLASH = b"\x03", b"\x04", b"\x1a", b"\x1c"
RAW = "stty raw -echo; "


def on_terminal(launch: Launch, order: TerminalSpec = PLAIN, *, awaited: bool = True) -> Launch:
    environment = {**PATH, "TERM": "dumb", "PS1": "ready> "}
    return dataclasses.replace(
        launch,
        shim=replace(launch.shim, terminal=order, stdin=True, awaits_attach=awaited),
        invocation=dataclasses.replace(launch.invocation, environment=environment),
    )


def text_of(launch: Launch, order: TerminalSpec = PLAIN) -> str:
    """Return all that is shown of a job that needs no one to type."""
    start(on_terminal(launch, order))
    with Client(Path(launch.shim.directory), "attach") as client:
        return client.collect()[FrameKind.STDOUT].decode().replace("\r\n", "\n")


def test_the_three_streams_are_the_terminal(directory: Path) -> None:
    program = """
import os, sys
print([os.isatty(fd) for fd in (0, 1, 2)], len({os.ttyname(fd) for fd in (0, 1, 2)}))
print(os.ttyname(0) == os.ttyname(os.open("/dev/tty", os.O_RDWR)) or os.ttyname(0))
print("complaint", file=sys.stderr)
"""
    shown = text_of(python(directory, program))

    assert shown.startswith("[True, True, True] 1\n")
    assert shown.endswith("complaint\n")
    assert output(directory).replace("\r\n", "\n") == shown
    assert (directory / "stderr").read_bytes() == b""


def test_standard_error_stays_apart_where_it_was_apart(directory: Path) -> None:
    order = replace(PLAIN, stderr=False)
    start(on_terminal(shell(directory, "tty -s; echo $?; test -t 2; echo $? >&2"), order))
    with Client(directory, "attach") as client:
        seen = client.collect()

    assert (seen[FrameKind.STDOUT], seen[FrameKind.STDERR]) == (b"0\r\n", b"1\n")
    assert (directory / "stderr").read_bytes() == b"1\n"


def test_a_job_on_a_terminal_holds_its_three_descriptors_and_no_other(directory: Path) -> None:
    started = start(on_terminal(shell(directory, "exec sleep 1000")))
    held = Path(f"/proc/{started.pid}/fd")
    wait_until(lambda: Path(f"/proc/{started.pid}/comm").read_text() == "sleep\n")

    assert sorted(link.name for link in held.iterdir()) == ["0", "1", "2"]
    # Nobody has attached, which the end would wait for.
    with Client(directory, "attach") as client:
        client.until(FrameKind.STARTED)


def test_it_is_the_foreground_group_of_its_shims_session(directory: Path) -> None:
    started = start(on_terminal(shell(directory, f"{READ_STAT}; echo $sid $pgid $tpgid $pid")))
    with Client(directory, "attach") as client:
        shown = client.collect()[FrameKind.STDOUT].split()

    pid = started.pid
    assert [int(number) for number in shown] == [started.shim_pid, pid, pid, pid]


def test_a_new_size_reaches_the_job(directory: Path) -> None:
    script = "trap 'stty size' WINCH; echo up; while :; do sleep 1000 & wait; done"
    start(on_terminal(shell(directory, script)))
    with Client(directory, "attach") as client:
        client.read_until(b"up")
        client.send(FrameKind.WINDOW, rows=55, columns=203)
        client.read_until(b"55 203")
        with Client(directory) as second:
            second.send(FrameKind.HELLO, role="attach", window={"rows": 11, "columns": 22})
            second.read_until(b"11 22")
            # Who only watches has no say, and no size is too large.
            client.send(FrameKind.WINDOW, rows=1, columns=1)
            second.send(FrameKind.WINDOW, rows=44, columns=1 << 40)
            assert b"\n1 1" not in second.read_until(b"44 65535")


def test_who_attaches_later_has_the_screen_drawn_anew(directory: Path) -> None:
    script = "trap 'echo drawn' WINCH; echo up; while :; do sleep 1000 & wait; done"
    start(on_terminal(shell(directory, script)))
    window = {"rows": 30, "columns": 100}
    wait_until(lambda: "up" in output(directory))
    with Client(directory) as client:
        client.send(FrameKind.HELLO, role="attach", window=window)
        client.read_until(b"drawn")


def test_a_peer_that_attaches_after_the_end_gets_the_output_and_the_exit_code(
    directory: Path,
) -> None:
    start(on_terminal(shell(directory, "echo hello; exit 3")))
    assert end(directory).exit_code == 3
    with Client(directory) as client:
        client.send(FrameKind.HELLO, role="attach", window={"rows": 30, "columns": 100})
        seen = client.collect()
        assert client.is_closed()

    assert seen[FrameKind.STDOUT] == b"hello\r\n"
    assert json.loads(seen[FrameKind.EXITED])["exit_code"] == 3
    assert (directory / "stderr").read_bytes() == b""


def attributes() -> list[int]:
    """Return the attributes of a new terminal as the command sends them."""
    master, slave = pty.openpty()
    try:
        *numbers, controls = termios.tcgetattr(slave)
        return [*numbers, *(each if isinstance(each, int) else each[0] for each in controls)]
    finally:
        os.close(master)
        os.close(slave)


def test_the_attributes_of_the_callers_terminal_are_taken_over(directory: Path) -> None:
    wanted = attributes()
    wanted[3] &= ~termios.ECHO
    wanted[6 + termios.VINTR] = ord("X") - 64
    order = replace(PLAIN, attributes=tuple(wanted))

    shown = text_of(shell(directory, "stty -a"), order)

    assert "intr = ^X;" in shown
    assert " -echo " in shown
    assert "erase = ^?;" in shown


NONSENSE = [
    (1, 2, 3),
    (-1,) * 60,
    (1 << 80,) * 38,
    tuple(range(300, 338)),
    (*attributes()[:4], 77777, 77777, *attributes()[6:]),
]


@pytest.mark.parametrize("numbers", NONSENSE, ids=range(len(NONSENSE)))
def test_attributes_that_make_no_sense_do_not_keep_a_job_from_running(
    directory: Path, numbers: tuple[int, ...]
) -> None:
    order = TerminalSpec(rows=-5, columns=1 << 70, attributes=numbers, stderr=True)

    assert text_of(shell(directory, "stty sane; stty size"), order) == "0 65535\n"


def test_ctrl_c_interrupts_the_foreground_alone(directory: Path) -> None:
    program = """
import os, signal, sys, time
if os.fork() == 0:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, lambda *_: os.write(1, b"background\\n"))
    os.write(1, b"up\\n")
    signal.sigwait({signal.SIGTERM})
    os._exit(0)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGINT, lambda *_: os._exit(7))
    os.write(1, b"up\\n")
    time.sleep(1000)
try:
    os.write(1, b"up\\n")
    time.sleep(1000)
except KeyboardInterrupt:
    print("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    start(on_terminal(python(directory, program)))
    with Client(directory, "attach") as client:
        wait_until(lambda: output(directory).count("up") == 3)
        client.send(FrameKind.STDIN, CTRL_C)
        shown = client.read_until(b"code 7")
        client.until(FrameKind.MAIN_EXITED)
        assert is_alive(directory)
        assert b"background" not in shown


@pytest.mark.parametrize(
    ("prepare", "typed", "is_interrupted"),
    [("", CTRL_C, True), ("", b"x\n", False), (RAW, CTRL_C, False)],
)
def test_the_record_says_that_ctrl_c_was_typed(
    directory: Path, prepare: str, typed: bytes, is_interrupted: bool
) -> None:
    script = f"{prepare}trap 'exit 3' INT; echo up; head -c 1 >/dev/null; exit 3"
    start(on_terminal(shell(directory, script)))
    with Client(directory, "attach") as client:
        client.read_until(b"up")
        client.send(FrameKind.STDIN, typed)
        ended = json.loads(client.until(FrameKind.EXITED))
    assert (ended["exit_code"], ended.get("interrupted", False)) == (3, is_interrupted)


def test_the_shim_outlives_every_key(directory: Path) -> None:
    script = "trap '' INT QUIT TSTP; echo up; read line; echo got $line"
    start(on_terminal(shell(directory, script)))
    with Client(directory, "attach") as client:
        client.read_until(b"up")
        client.send(FrameKind.STDIN, CTRL_C + CTRL_BACKSLASH + CTRL_Z + b"words\n")
        client.read_until(b"got words")
        assert json.loads(client.until(FrameKind.EXITED))["exit_code"] == 0


def test_ctrl_z_suspends_the_job_and_sigcont_goes_on(directory: Path) -> None:
    started = start(on_terminal(shell(directory, "echo up; cat; echo done")))
    with Client(directory, "attach") as client, Client(directory, "watch") as aside:
        client.read_until(b"up")
        for _ in range(3):
            client.send(FrameKind.STDIN, CTRL_Z)
            for peer in (client, aside):
                assert json.loads(peer.until(FrameKind.SUSPENDED)) == {"signal": signal.SIGTSTP}
            with Client(directory, "watch") as late:
                late.until(FrameKind.SUSPENDED)
            assert state(started.pid) == "T"
            client.send(FrameKind.SIGNAL, signal=int(signal.SIGCONT))
            wait_until(lambda: state(started.pid) == "S", "going on")
        client.send(FrameKind.STDIN, b"words\n" + CTRL_D)
        shown = client.collect()

    assert b"words\r\nwords\r\ndone\r\n" in shown[FrameKind.STDOUT]
    assert json.loads(shown[FrameKind.EXITED])["exit_code"] == 0


def test_a_shell_of_the_job_controls_its_own_jobs(directory: Path) -> None:
    start(on_terminal(shell(directory, "exec bash --norc --noprofile -i")))
    with Client(directory, "attach") as client:
        client.read_until(b"ready> ")
        client.send(FrameKind.STDIN, b"sh -c 'echo pid=$$.; exec cat'\n")
        cat = int(wait_until(lambda: re.search(r"pid=(\d+)\.", output(directory)))[1])
        wait_until(lambda: Path(f"/proc/{cat}/comm").read_text() == "cat\n")
        client.send(FrameKind.STDIN, CTRL_Z)
        wait_until(lambda: state(cat) == "T")
        client.send(FrameKind.STDIN, b"fg\n")
        wait_until(lambda: state(cat) == "S")
        client.send(FrameKind.STDIN, b"again\n")
        wait_until(lambda: output(directory).count("again") == 2)
        client.send(FrameKind.STDIN, CTRL_D + b"exit 5\n")
        seen = client.collect()

    assert FrameKind.SUSPENDED not in {kind for kind, payload in seen.items() if payload}
    assert json.loads(seen[FrameKind.EXITED])["exit_code"] == 5


def test_what_a_shell_leaves_stopped_does_not_keep_the_job_for_ever(directory: Path) -> None:
    program = """
import os, signal, time
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.kill(os.getpid(), signal.SIGTSTP)
    time.sleep(1000)
os.waitpid(child, os.WUNTRACED)
os._exit(4)
"""
    start(on_terminal(python(directory, program), awaited=False))

    assert end(directory).exit_code == 4


def test_who_reads_in_the_background_when_the_rest_has_gone_does_not_wait_for_ever(
    directory: Path,
) -> None:
    program = """
import os
parent = os.getpid()
if os.fork() == 0:
    os.setpgid(0, 0)
    while os.getppid() == parent:
        pass
    os.read(0, 1)
"""
    start(on_terminal(python(directory, program), awaited=False))

    assert end(directory).exit_code == 0


@pytest.mark.parametrize("typed", [b"", b"a line\n", b"no line"])
def test_the_end_of_the_input_is_typed(directory: Path, typed: bytes) -> None:
    script = "stty -echo eof ^E; echo up; cat; echo +; cat; echo -"
    start(on_terminal(shell(directory, script)))
    with Client(directory, "attach") as client:
        client.read_until(b"up\r\n")
        client.send(FrameKind.STDIN, typed) if typed else None
        client.send(FrameKind.STDIN_END)
        first = client.read_until(b"+\r\n")
        client.send(FrameKind.STDIN, b"more\n")
        client.send(FrameKind.STDIN_END)
        shown = first + client.collect()[FrameKind.STDOUT]

    assert shown.replace(b"\r", b"") == typed + b"+\nmore\n-\n"


def test_a_lost_writer_leaves_the_job_reading(directory: Path) -> None:
    start(on_terminal(shell(directory, "read a; echo first $a; read b; echo second $b")))
    with Client(directory, "attach") as first:
        first.send(FrameKind.STDIN, b"one\n")
        first.read_until(b"first one")

    with Client(directory, "attach") as second:
        second.send(FrameKind.STDIN, b"two\n")
        assert b"second two" in second.collect()[FrameKind.STDOUT]


def test_a_job_that_no_one_attaches_to_keeps_its_terminal_open(directory: Path) -> None:
    start(on_terminal(shell(directory, "read a; echo got $a"), awaited=False))
    with Client(directory, "attach") as client:
        client.send(FrameKind.STDIN, b"it\n")
        assert b"got it" in client.collect()[FrameKind.STDOUT]


def test_what_was_printed_last_is_never_lost(tmp_path: Path) -> None:
    for size in (1, 4095, 4096, 4097, 20_000, 70_000) * 2:
        with job_directory() as made:
            wanted = "".join(random.choices(string.ascii_letters, k=size))
            path = tmp_path / "wanted"
            path.write_text(wanted)
            finish(on_terminal(shell(made, f"cat {path}"), awaited=False))
            assert output(made) == wanted


def test_a_job_that_closes_its_terminal_may_open_it_again(directory: Path) -> None:
    script = "exec 0<&- 1>&- 2>&-; sleep 0.1; exec >/dev/tty; echo here again"

    assert text_of(shell(directory, script)) == "here again\n"


def test_a_large_paste_reaches_a_raw_job_whole(directory: Path) -> None:
    pasted = os.urandom(200 << 10)
    program = """
import os, sys, termios, tty, hashlib
tty.setraw(0)
os.write(1, b"up")
left, digest = 200 << 10, hashlib.sha256()
while left:
    piece = os.read(0, left)
    os.write(1, b"." * (len(piece) // 16))
    digest.update(piece)
    left -= len(piece)
os.write(1, digest.hexdigest().encode())
"""
    start(on_terminal(python(directory, program)))
    with Client(directory, "attach") as client:
        client.read_until(b"up")
        for at in range(0, len(pasted), 7777):
            client.send(FrameKind.STDIN, pasted[at : at + 7777])
        shown = client.collect()[FrameKind.STDOUT]

    assert shown.decode().lstrip(".") == hashlib.sha256(pasted).hexdigest()


def test_a_line_longer_than_a_terminal_keeps_blocks_no_one(directory: Path) -> None:
    start(on_terminal(shell(directory, "echo up; read line; echo ${#line}")))
    with Client(directory, "attach") as client:
        client.read_until(b"up")
        client.send(FrameKind.STDIN, b"x" * (200 << 10) + b"\n")
        seen = client.collect()

    assert seen[FrameKind.STDOUT].endswith(b"\r\n4095\r\n")  # see termios(3), canonical mode


def test_a_job_that_reads_nothing_may_be_typed_at(directory: Path) -> None:
    start(on_terminal(shell(directory, RAW + "echo up; exec sleep 1000")))
    with Client(directory, "attach") as client, Client(directory, "control") as control:
        client.read_until(b"up")
        client.send(FrameKind.STDIN, b"z" * (200 << 10))
        control.send(FrameKind.STOP, reason="cancelled", grace_s=60)
        assert json.loads(client.until(FrameKind.EXITED))["reason"] == "cancelled"


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_the_terminal_is_the_users_own(directory: Path) -> None:
    program = """
import os, stat
found = os.stat(0)
print(found.st_uid == os.getuid() != 0, oct(found.st_mode & 0o707))
with open("/dev/tty", "w") as terminal, open("/dev/stderr", "w") as error:
    print("by name", file=terminal)
    print("by number", file=error)
"""
    with ephemeral_user() as user:
        shown = text_of(python(directory, program, identity=user_identity(user, ())))
        wait_until(lambda: not is_alive(directory), "the end of the shim")

    assert shown == "True 0o600\nby name\nby number\n"
