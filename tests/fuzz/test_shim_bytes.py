"""Anything at all on a job's own socket: the job runs on, ends as it ends, the next is served."""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuzz import examples
from fuzz.unix import connected
from gpulease.shim.launch_request import TerminalSpec
from gpulease.wire.frames import HEADER, LARGEST_FRAME, FrameKind, frame
from process_rig import Client, end, is_alive, job_directory, python, start

_ECHO = "import sys\nfor line in sys.stdin:\n    print(line, end='', flush=True)\nsys.exit(7)"
_SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(1000)"


@pytest.fixture(scope="module", params=["pipes", "terminal"])
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The directory of a job that sleeps, and that must sleep on."""
    with job_directory() as made:
        terminal = TerminalSpec(24, 80, None, True) if request.param == "terminal" else None
        start(python(made, _SLEEP, stdin=True, awaits_attach=True, terminal=terminal))
        yield made
        # What peers send is never taken for an error of the shim's own.
        logs = [(made / name).read_bytes() for name in ("stdout", "stderr")]
        assert not any(b"the shim failed" in log for log in logs), logs


def shot(directory: Path, data: bytes, *, read: bool) -> None:
    """Connect, send, and leave, having read what came or not."""
    with connected(directory / "socket") as link, contextlib.suppress(OSError):
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        while read and link.recv(1 << 16):
            pass


def is_served(directory: Path) -> None:
    """Check that the shim lives, and lets one who behaves watch the job."""
    assert is_alive(directory)
    with Client(directory, "watch") as client:
        client.until(FrameKind.STARTED)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
_ROLES = st.sampled_from(["attach", "watch", "root", "", "ATTACH"]) | _JSON
_NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.floats() | st.just(10**400) | _JSON
_WINDOWS = st.fixed_dictionaries({"rows": _NUMBERS, "columns": _NUMBERS}) | _JSON
_HELLO = st.fixed_dictionaries({"role": _ROLES}, optional={"window": _WINDOWS}) | _JSON


def _written(kind: FrameKind, content: st.SearchStrategy[object]) -> st.SearchStrategy[bytes]:
    return content.map(lambda it: frame(kind, json.dumps(it).encode()))


def _length(kind: int, length: int, payload: bytes) -> bytes:
    return HEADER.pack(kind, length) + payload


_FRAMES = st.one_of(
    _written(FrameKind.HELLO, _HELLO),
    _written(FrameKind.HELLO, st.sampled_from([{"role": "attach"}, {"role": "watch"}])),
    _written(FrameKind.WINDOW, _WINDOWS),
    # No signal that would end the job: any user may end their own.
    _written(FrameKind.SIGNAL, st.fixed_dictionaries({"signal": st.integers(65, 1 << 80)}) | _JSON),
    _written(FrameKind.SIGNAL, st.fixed_dictionaries({"signal": st.integers(-(1 << 80), 0)})),
    st.binary(max_size=60).map(lambda it: frame(FrameKind.STDIN, it)),
    st.sampled_from([FrameKind.STDOUT, FrameKind.EXITED, FrameKind.REFUSED]).map(frame),
    st.builds(_length, st.integers(0, 255), st.integers(0, (1 << 32) - 1), st.binary(max_size=60)),
    st.binary(max_size=60),
)


@examples(120)
@given(st.lists(_FRAMES, min_size=1, max_size=6))
@example([frame(FrameKind.HELLO, b"[" * 1_000_000)])
@example([frame(FrameKind.HELLO, b'{"role":' * 120_000)])
@example([frame(FrameKind.HELLO, b'{"role": ' + b"9" * 900_000 + b"}")])
@example([frame(FrameKind.HELLO, b'{"role": "attach", "window": {"rows": NaN, "columns": 1}}')])
@example([frame(FrameKind.HELLO, b'{"role": "\xff"}')])
@example([frame(FrameKind.HELLO, b'{"role": ["attach"]}')])
@example([frame(FrameKind.HELLO, b'{"role": "attach", "window": {"rows": 1e999, "columns": 1}}')])
@example([_length(FrameKind.HELLO, (1 << 32) - 1, b"x" * 2_000_000)])
@example([_length(FrameKind.HELLO, LARGEST_FRAME, b"x" * (LARGEST_FRAME - 1))])
@example([frame(FrameKind.HELLO, b'{"role": "watch"}'), _length(FrameKind.STDIN, 1 << 20, b"")])
def test_no_frames_stop_a_job_or_its_shim(directory: Path, frames: list[bytes]) -> None:
    shot(directory, b"".join(frames), read=False)
    is_served(directory)


@examples(60)
@given(st.binary(min_size=1, max_size=5000))
def test_noise_is_no_frame(directory: Path, noise: bytes) -> None:
    shot(directory, noise, read=True)
    is_served(directory)


def test_thousands_of_connections_come_and_go(directory: Path) -> None:
    for number in range(3000):
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(directory / "socket"))
        if number % 3 == 0:
            link.send(b"\x10\0\0\0")
        if number % 5 == 0:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
    is_served(directory)


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_of_a_job_is_right_whatever_was_said_to_it(code: int) -> None:
    with job_directory() as directory:
        program = _ECHO.replace("sys.exit(7)", f"sys.exit({code})")
        start(python(directory, program, stdin=True, awaits_attach=True))
        with Client(directory, "attach") as client:
            client.send(FrameKind.STDIN, b"before\n")
            assert client.read(7) == b"before\n"
            for data in (
                os.urandom(3000),
                frame(FrameKind.HELLO, b"{"),
                frame(FrameKind.HELLO, b'{"role": "control"}') + frame(FrameKind.STOP, b"[]"),
                frame(FrameKind.HELLO, b'{"role": "control"}')
                + frame(FrameKind.TIME_LIMIT, b'{"time_limit_s": "soon"}'),
                frame(FrameKind.HELLO, b'{"role": "control"}')
                + frame(FrameKind.TIME_LIMIT, b'{"time_limit_s": NaN}'),
                frame(FrameKind.HELLO, b'{"role": "control"}')
                + frame(FrameKind.TIME_LIMIT, b'{"time_limit_s": null}'),
                frame(FrameKind.HELLO, b'{"role": "watch"}')
                + frame(FrameKind.STDIN, b"not theirs\n"),
                _length(FrameKind.HELLO, 1 << 31, b"y" * 100_000),
            ):
                shot(directory, data, read=False)
            client.send(FrameKind.STDIN, b"after\n")
            assert client.read(6) == b"after\n"
            client.send(FrameKind.STDIN_END)
            assert json.loads(client.until(FrameKind.EXITED))["exit_code"] == code
        assert end(directory).exit_code == code
