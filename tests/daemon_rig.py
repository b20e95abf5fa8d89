"""A real gpuleased in a folder of its own, asked through the typed client.

The command is started only where a test is about the command: each start of it costs a quarter of
a second of CPU, a request of the client a few milliseconds.
"""

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpulease.cli.caller import this_process
from gpulease.cli.program import resolve
from gpulease.cli.request import build
from gpulease.client import Client
from gpulease.errors import NoDaemon, NoSuchJob, WrongState
from gpulease.options import RunOptions
from gpulease.record import replace
from gpulease.wire.requests import to_wire

T = TypeVar("T")

PATIENCE_S = 120.0
"""How long a condition may take to come true on a machine under load."""

_DAEMON = [sys.executable, "-m", "gpulease.daemon"]
_FLAGS = {
    "exclusive",
    "pty",
    "growth",
    "deterministic",
    "strict",
    "held",
    "linked",
    "requeue",
    "preemptible",
    "same_model",
}


def free_port() -> int:
    """Return a port of loopback that nothing listens on, below those that the kernel gives out."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(what: str, condition: Callable[[], T | None], within_s: float = PATIENCE_S) -> T:
    """Return the first true value of `condition`; fail loudly if none comes.

    Asks less and less often: each time costs a daemon or a cluster several milliseconds of CPU.
    """
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < within_s:
        if value := condition():
            return value
        time.sleep(min(0.1, max(0.02, waited / 10)))
    raise AssertionError(f"never happened: {what}")


class Forked:
    """A daemon that a process which had imported gpulease forked: as `Popen`, without a status."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def poll(self) -> int | None:
        return 0 if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        assert select.select([self._pidfd], [], [], timeout)[0], "it did not end"
        return 0


class Zygote:
    """The process that forks daemons: to import what they need takes a second of CPU."""

    def __init__(self, module: str = "daemon_zygote") -> None:
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            cwd=Path(__file__).parent, text=True,
        )  # fmt: skip

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Forked:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"arguments": arguments, "log": str(log), "environment": environment}
        with self._turn:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return Forked(int(self._process.stdout.readline()))

    def close(self) -> None:
        """Start no more; the daemons end as well."""
        self._process.kill()
        self._process.communicate()


zygote = cache(Zygote)


@dataclass
class Daemon:
    """One gpuleased: started, killed, started again, always on the same state."""

    folder: Path
    simulate: str | None = "2x8G"
    settings: Mapping[str, str] = field(default_factory=dict)
    tables: str = ""
    """What stands below the settings in the file, in TOML."""
    environment: dict[str, str] = field(default_factory=dict)
    forked: bool = True
    """Started by a fork of a process that has imported it, unless `command` is another program."""
    process: subprocess.Popen[bytes] | Forked | None = None
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

    @property
    def client(self) -> Client:
        return Client(self.socket)

    def command(self) -> list[str]:
        command = [*_DAEMON, "--socket", str(self.socket), "--state", str(self.state)]
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
        command, log = self.command(), self.folder / "log"
        environment = {**os.environ, **self.environment}
        if self.forked and command[:3] == _DAEMON:
            self.process = zygote().start(command[3:], log, environment)
        else:
            with log.open("ab") as said:
                self.process = subprocess.Popen(
                    command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env=environment,
                    cwd="/",
                )  # fmt: skip
        wait_for("the daemon is ready", self._ready)
        return self

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        try:
            self.client.status()
        except NoDaemon:
            return False
        return True

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
        """Queue what `gpulease run -d` would queue for these arguments, and return its id."""
        options, command = _options_of(arguments)
        caller = this_process()
        request = build(replace(options, detach=True), command, caller)
        found = resolve(command, Path(caller.cwd), caller.environment)
        request.argv = [to_wire(word) for word in found]
        return self.client.submit(request).id

    def cancel(self, *jobs: int) -> None:
        for job in jobs:
            self.client.cancel(job)

    def job(self, job: int) -> dict[str, Any]:
        return _shown(self.client.job(job))

    def jobs(self) -> list[dict[str, Any]]:
        """Return every job that is on record."""
        return [_shown(job) for job in self.client.jobs(everything=True).jobs]

    def status(self) -> dict[str, Any]:
        return _shown(self.client.status())

    def tries(self, job: int) -> list[dict[str, Any]]:
        """Return a job and those that continue it, once the last of them has ended."""
        found = [self.wait_until(job, "ended")]
        while (number := found[-1]["retried_as"]) is not None:
            found.append(self.wait_until(number, "ended"))
        return found

    def wait_until(self, job: int, *states: str) -> dict[str, Any]:
        """Return the job as soon as it is in one of `states`; it may be yet to come."""

        def there() -> dict[str, Any] | None:
            try:
                shown = self.client.job(job)
            except NoSuchJob:
                return None
            return _shown(shown) if shown.state in states else None

        return wait_for(f"job {job} is {' or '.join(states)}", there)

    def end_jobs(self) -> None:
        """Cancel what still runs or waits, and see it gone."""
        live = self.client.status().jobs
        for job in live:
            with suppress(WrongState):  # it has ended meanwhile
                self.client.cancel(job.id)
        for job in live:
            self.wait_until(job.id, "ended")

    def end_all(self) -> None:
        """End the daemon and its jobs, so that no test leaves a process behind."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.end_jobs()
            self.kill(signal.SIGTERM)

    def close_all(self) -> None:
        """End what `open` started and the test, perhaps in its middle, left."""
        for process in self.opened:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with suppress(BrokenPipeError):  # what the process has not read
                        stream.close()
        self.opened.clear()


@contextmanager
def daemons(base: Path) -> Iterator[Callable[..., Daemon]]:
    """Yield a maker of daemons, each in a folder below `base`; all are ended afterwards."""
    made: list[Daemon] = []

    def make(folder: Path | None = None, **fields: Any) -> Daemon:
        folder = folder or base / f"d{len(made)}"
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


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a folder whose sockets every user can reach: pytest closes its own to others."""
    with tempfile.TemporaryDirectory(prefix="gpulease-open-", dir="/tmp") as name:
        Path(name).chmod(0o711)
        yield Path(name)


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


def _shown(view: object) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(view))
    return shown


def _options_of(arguments: Sequence[str]) -> tuple[RunOptions, list[str]]:
    """Read the options of `run` that stand before a command."""
    given: dict[str, Any] = {}
    words = list(arguments)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        name = word.removeprefix("--").replace("-", "_")
        given[name] = True if name in _FLAGS else words.pop(0)
    for name in {"gpus", "cpus", "retries"} & given.keys():
        given[name] = int(given[name])
    for name in {"gpu", "notify", "retry_on"} & given.keys():
        given[name] = [given[name]]
    return RunOptions(**given), words
