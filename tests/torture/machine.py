"""A machine under torture: one state directory, and the daemon that serves it for the moment."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpulease.client import Client
from gpulease.errors import GpuleaseError, NoDaemon
from torture import points
from torture.wounds import ENCLOSED

T = TypeVar("T")
TESTS = Path(__file__).parents[1]
PATIENCE_S = 120.0
"""How long a condition may take to come true on a machine under load."""
_SETTINGS = """\
grace = "1s"
overuse_tolerance = "32M"
overuse_grace = "1s"
"""


class Tortured(Exception):
    """The torture itself could not go on."""


def wait_for(what: str, condition: Callable[[], T], within_s: float = PATIENCE_S) -> T:
    """Return the first true value of `condition`."""
    deadline = time.monotonic() + within_s
    while not (met := condition()):
        if time.monotonic() > deadline:
            raise Tortured(f"never happened: {what}")
        time.sleep(0.01)
    return met


class Zygote:
    """The process that starts wounded daemons."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torture.zygote"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(TESTS)}, text=True,
        )  # fmt: skip

    def start(self, arguments: list[str], log: Path, environment: dict[str, str]) -> int:
        """Start a daemon and return its pid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"arguments": arguments, "log": str(log), "environment": environment}
        with self._turn:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self) -> None:
        """Start no more."""
        self._process.kill()
        self._process.communicate()


class Machine:
    """The daemon is started, killed and started again, always on the same state."""

    def __init__(
        self,
        folder: Path,
        zygote: Zygote | None = None,
        simulate: str | None = "2x8G",
        settings: str = _SETTINGS,
    ) -> None:
        """With a zygote daemons are wounded; without, they are processes like any.

        Without simulated GPUs they find a driver by what is put into `environment`.
        """
        self.folder = folder
        self.socket = folder / "s"
        self.state = folder / "state"
        self.simulate = simulate
        self.kills = 0
        self.environment: dict[str, str] = {points.FOLDER: str(folder)}
        self._zygote = zygote
        self._pidfd: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        (folder / "config.toml").write_text(settings)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self, *, enclosed: bool = False) -> None:
        """Start the daemon; it is ready later."""
        arguments = ["--socket", str(self.socket), "--state", str(self.state)]
        arguments += ["--config", str(self.folder / "config.toml")]
        arguments += [] if self.simulate is None else ["--simulate", self.simulate]
        if self._zygote is not None:
            around = {**self.environment, **({ENCLOSED: "1"} if enclosed else {})}
            self.pid = self._zygote.start(arguments, self.log, around)
        else:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "gpulease.daemon", *arguments], cwd="/",
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, **self.environment},
                )  # fmt: skip
            self.pid = self._process.pid
        with suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self.pid)

    def is_up(self) -> bool:
        """Tell whether the daemon lives."""
        return self._pidfd is not None and not select.select([self._pidfd], [], [], 0)[0]

    def ready(self) -> "Machine":
        """Wait until the daemon answers."""

        def answers() -> bool:
            if not self.is_up():
                raise Tortured(f"the daemon ended by itself:\n{self.said()}")
            try:
                self.client().status()
            except NoDaemon:
                return False
            return True

        wait_for("the daemon is ready", answers)
        return self

    def said(self) -> str:
        """Return the end of the daemon's log."""
        return self.log.read_text(errors="replace")[-4000:]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the daemon; what it launched goes on."""
        assert self._pidfd is not None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
        self.gone()

    def gone(self, within_s: float = PATIENCE_S) -> None:
        """Wait until the daemon has been killed."""
        if self._pidfd is not None:
            wait_for("the daemon's end", lambda: not self.is_up(), within_s)
            os.close(self._pidfd)
            self._pidfd = None
        if self._process is not None:
            self._process.wait()
            self._process = None
        self.kills += 1

    def client(self) -> Client:
        return Client(self.socket)

    def insist(self, call: Callable[[Client], T]) -> T | None:
        """Ask until the daemon has answered; None if it refused."""

        def asked() -> list[T | None]:
            try:
                return [call(self.client())]
            except NoDaemon:
                return []
            except GpuleaseError:
                return [None]

        return wait_for("an answer of the daemon", asked)[0]
