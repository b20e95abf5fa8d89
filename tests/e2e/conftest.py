"""A real gpuleased in a folder of its own, and the real command against it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gpulease.process.namespaces import has_first_pids

T = TypeVar("T")

PATIENCE_S = 60.0
"""How long a condition may take to come true on a machine under load."""


def wait_for(what: str, condition: Callable[[], T], within_s: float = PATIENCE_S) -> T:
    """Return the first true value of `condition`; fail loudly if none comes."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"never happened: {what}")


@dataclass
class Daemon:
    """One gpuleased: started, killed, started again, always on the same state."""

    folder: Path
    simulate: str | None = "2x8G"
    settings: Mapping[str, str] = field(default_factory=dict)
    tables: str = ""
    """What stands below the settings in the file, in TOML."""
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    opened: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "gpulease.daemon"]
        command += ["--socket", str(self.socket), "--state", str(self.state)]
        if self.simulate is not None:
            command += ["--simulate", self.simulate]
        if self.settings:
            config = self.folder / "config.toml"
            lines = "".join(f'{key} = "{it}"\n' for key, it in self.settings.items())
            config.write_text(lines + self.tables)
            command += ["--config", str(config)]
        return command

    def start(self) -> "Daemon":
        """Start it and wait until it can grant."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment}, cwd="/",
            )  # fmt: skip
        wait_for("the daemon is ready", self._ready)
        return self

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        return self.run("status", "--json", check=False).returncode == 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the daemon; what it launched goes on."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)

    def gpulease(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "gpulease.cli", "--socket", str(self.socket), *arguments]

    def run(
        self, *arguments: str, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        options = {"capture_output": True, "text": True, "timeout": PATIENCE_S, **options}
        done = subprocess.run(self.gpulease(*arguments), check=False, **options)
        assert not check or done.returncode == 0, (done, self.log)
        return done

    def open(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start the command and leave it running, to the end of the test at most."""
        self.opened.append(subprocess.Popen(self.gpulease(*arguments), **options))
        return self.opened[-1]

    def submit(self, *arguments: str) -> int:
        """Run detached, and return the job's id."""
        return int(self.run("run", "-d", *arguments).stdout)

    def job(self, job: int) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.run("show", "--json", str(job)).stdout)
        return shown

    def status(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return shown

    def wait_until(self, job: int, *states: str) -> dict[str, Any]:
        """Return the job as soon as it is in one of `states`; it may be yet to come."""

        def there() -> dict[str, Any] | None:
            answer = self.run("show", "--json", str(job), check=False)
            if answer.returncode != 0 and str(job) in answer.stderr:
                return None
            assert answer.returncode == 0, (answer, self.log)
            shown: dict[str, Any] = json.loads(answer.stdout)
            return shown if shown["state"] in states else None

        return wait_for(f"job {job} is {' or '.join(states)}", there)

    def end_all(self) -> None:
        """Cancel what still runs, so that no test leaves a process behind."""
        if self.process is None:
            return
        if self.process.poll() is None:
            live = [str(job["id"]) for job in self.status()["jobs"]]
            if live:
                self.run("cancel", *live, check=False)
            for job in live:
                self.wait_until(int(job), "ended")
            self.kill(signal.SIGTERM)

    def close_all(self) -> None:
        """End what `open` started and the test, perhaps in its middle, left."""
        for process in self.opened:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Return a maker of daemons, each in a folder of its own; all are ended with the test."""
    made: list[Daemon] = []

    def make(folder: Path | None = None, **fields: Any) -> Daemon:
        folder = folder or tmp_path / f"d{len(made)}"
        folder.mkdir(exist_ok=True)
        daemon = Daemon(folder, **fields)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        try:
            daemon.end_all()
        finally:
            daemon.close_all()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Return a running daemon with two simulated GPUs of 8 GiB and a short grace."""
    started: Daemon = make_daemon(settings={"grace": "2s"})
    return started.start()


def alive(pids: Sequence[int]) -> list[int]:
    """Return those processes that are there and no zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


@pytest.fixture
def machines_pids() -> None:
    """Skip in a pid namespace of its own, where pids that a driver lists are not taken for ours."""
    if not has_first_pids():
        pytest.skip("needs the machine's own pid namespace, and this is another")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on a small disk but in what is there, and return the file to remove.

    The daemon has a reserve, which it gives back when it is needed: filled again, it is gone too.
    """
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass
    return ballast
