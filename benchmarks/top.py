"""What `gpulease top` costs while it is only looked at: CPU time, and bytes to the terminal.

It runs in a pseudo-terminal of 80x24, which over ssh would be the network. The floor is `gpulease
status --watch`, which prints a page as often, in another.
"""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.daemon import G, Running, order, running
from benchmarks.figures import Figure
from benchmarks.processes import ProcessGroup

RUNNING, WAITING = 24, 26
SETTLES_S = 8
MINUTE_S = 60
MOST_S = 0.5
MOST_RATIO = 3
MOST_KIB = 32
_SIZE = (24, 80)


@dataclass
class _Screen:
    """A terminal, and how many bytes were written to it."""

    pid: int
    written: int = 0


def run() -> Iterator[Figure]:
    """Measure a minute at rest, with 8 GPUs and 50 jobs."""
    with running() as daemon:
        _fill(daemon)
        with (
            _terminal(daemon, "top") as ours,
            _terminal(daemon, "status", "--watch", "2s") as other,
        ):
            time.sleep(SETTLES_S)
            begun, written = [_cpu_s(each.pid) for each in (ours, other)], ours.written
            time.sleep(MINUTE_S)
            used = [_cpu_s(each.pid) for each in (ours, other)]
            kib = (ours.written - written) / 1024
        cpu, watching = (end - begin for begin, end in zip(begun, used, strict=True))
        what = f"top at rest for a minute, {RUNNING + WAITING} jobs"
        yield Figure(f"CPU of {what}", cpu, "s", MOST_S)
        yield Figure(f"CPU of {what}", cpu, "s", MOST_RATIO, watching, "status --watch")
        yield Figure(f"terminal output of {what}", kib, "KiB", MOST_KIB)


def _fill(daemon: Running) -> None:
    client = daemon.client()
    for _ in range(RUNNING):
        client.submit(order("sleep", "3600", memory=24 * G))
    for _ in range(WAITING):
        client.submit(order("true", memory=80 * G))
    while len(client.jobs(state="active").jobs) < RUNNING:
        time.sleep(0.05)


@contextmanager
def _terminal(daemon: Running, *line: str) -> Iterator[_Screen]:
    """Run a command in a terminal that shows nothing."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", *_SIZE, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "gpulease.cli", *line], stdin=inner, stdout=inner, stderr=inner,
        env={**daemon.env, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}, start_new_session=True,
    )  # fmt: skip
    screen = _Screen(process.pid)
    threading.Thread(target=_read, args=(outer, screen), daemon=True).start()
    try:
        yield screen
    finally:
        process.terminate()
        process.wait()
        os.close(inner)
        os.close(outer)


def _read(terminal: int, screen: _Screen) -> None:
    try:
        while piece := os.read(terminal, 1 << 16):
            screen.written += len(piece)
    except OSError:
        pass  # it was closed


def _cpu_s(pid: int) -> float:
    return ProcessGroup(pid, None).cpu_s()
