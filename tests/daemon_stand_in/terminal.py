"""A user at a terminal, as the command sees one: a pseudo-terminal that a test types into."""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 120.0


class Terminal:
    """A process that leads a session on a terminal of its own, as a login does."""

    def __init__(
        self,
        command: Sequence[str],
        size: tuple[int, int] = (24, 80),
        prepare: Callable[[int], None] = lambda _: None,
        **environment: str,
    ) -> None:
        """`prepare` is called with the terminal before the command finds it."""
        given = {"TERM": "xterm", "PATH": os.environ["PATH"], "TZ": "UTC"}
        variables = given | {"PYTHONPATH": str(REPOSITORY), "PS1": "$ "} | environment
        # The inner end stays open here too, so that what was shown last can be read at leisure.
        self.handle, self._inner = os.openpty()
        _set_size(self._inner, size)
        prepare(self._inner)
        self.found: list[Any] = termios.tcgetattr(self._inner)
        self.pid = self._fork(command, variables)
        self.shown = ""
        self._bytes = b""
        self.status: int | None = None

    def _fork(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        name = os.ttyname(self._inner)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                inner = os.open(name, os.O_RDWR)  # and so it is the controlling one
                for handle in (0, 1, 2):
                    os.dup2(inner, handle)
                os.closerange(3, 256)
                os.execve(command[0], list(command), dict(variables))
            os._exit(127)
        return pid

    def type(self, keys: bytes) -> None:
        os.write(self.handle, keys)

    def resize(self, rows: int, columns: int) -> None:
        _set_size(self.handle, (rows, columns))

    @property
    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self.handle)

    @property
    def is_raw(self) -> bool:
        return not self.attributes[3] & (termios.ICANON | termios.ECHO | termios.ISIG)

    def read_until(self, text: str, *, after: int = 0) -> None:
        """Wait until `text` is shown; only what comes `after` so many characters counts."""
        while text not in self.shown[after:]:
            assert select.select([self.handle], [], [], PATIENCE_S)[0], self.shown
            assert self._read(), self.shown

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something, and show meanwhile what there is to show."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.shown
            if select.select([self.handle], [], [], 0.02)[0]:
                self._read()

    def finish(self) -> int:
        """Wait for the process to end, close the terminal, and return what a shell would say."""
        self.until(self._has_ended)
        while select.select([self.handle], [], [], 0)[0] and self._read():
            pass
        self.after = self.attributes
        self._close()
        assert self.status is not None
        return self.status if self.status >= 0 else 128 - self.status

    def hang_up(self) -> int:
        """Close the terminal under the process, and return its status."""
        self._close()
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def _close(self) -> None:
        os.close(self.handle)
        os.close(self._inner)

    def _has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def _read(self) -> bool:
        try:
            piece = os.read(self.handle, 1 << 16)
        except OSError:
            return False
        self._bytes += piece
        self.shown = self._bytes.decode(errors="replace")
        return bool(piece)


def gpulease(socket: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpulease.cli", "--socket", str(socket), *arguments]


def started(socket: Path, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a command whose streams are pipes; `options` are those of Popen."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), **options.pop("env", {})}
    return subprocess.Popen(gpulease(socket, *arguments), env=variables, **{**pipes, **options})


def ran(socket: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command without a terminal to its end."""
    return subprocess.run(
        gpulease(socket, *arguments), stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
        encoding="utf-8", check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )  # fmt: skip


def _set_size(handle: int, size: tuple[int, int]) -> None:
    fcntl.ioctl(handle, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
