"""A machine under torture: one state directory, and the daemon that serves it for the moment."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from daemon_rig import PATIENCE_S, Forked, Zygote, wait_for
from gpulease.client import Client
from gpulease.errors import GpuleaseError, NoDaemon
from torture import points
from torture.wounds import ENCLOSED

T = TypeVar("T")
TESTS = Path(__file__).parents[1]
_SETTINGS = """\
grace = "1s"
overuse_tolerance = "32M"
overuse_grace = "1s"
"""


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
        self._process: subprocess.Popen[bytes] | Forked | None = None
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
            self._process = self._zygote.start(arguments, self.log, {**os.environ, **around})
        else:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "gpulease.daemon", *arguments], cwd="/",
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, **self.environment},
                )  # fmt: skip

    def is_up(self) -> bool:
        """Tell whether the daemon lives."""
        return self._process is not None and self._process.poll() is None

    def ready(self) -> "Machine":
        """Wait until the daemon answers."""

        def answers() -> bool:
            if not self.is_up():
                raise AssertionError(f"the daemon ended by itself:\n{self.said()}")
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
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        self.gone()

    def gone(self) -> None:
        """Wait until the daemon has been killed."""
        if self._process is not None:
            self._process.wait(PATIENCE_S)
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
