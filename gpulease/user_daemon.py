"""Starting a daemon for one user on a machine without one, and finding it again.

Commands that need one at the same time start only one: they take a lock beside the socket, which
the kernel releases when its holder ends.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpulease.config import PERSONAL_LOG
from gpulease.daemon_packages import INSTALL_HINT, complaint, own_environment
from gpulease.errors import NoDaemon
from gpulease.path_ownership import shaky

START_WITHIN = 60.0
"""Seconds for a daemon to answer; it takes two on an idle machine."""
LOCK = "lock"
"""The lock of the daemon, in its state directory."""
IN_USE = "another gpuleased is using it"
"""Part of the message of a daemon that ends because another one holds the lock."""
SERVING = "serving.json"
"""The file in that directory that says where the daemon listens."""
_POLL_EVERY = 0.05
_ANSWERS_AFTER = 1.0
"""Seconds for another daemon that has made ours end."""
_LOG_TAIL = 4000
"""Bytes at the end of the log that are searched for the reason of a failed start."""

Answers = Callable[[Path], bool]


@dataclass(frozen=True, slots=True)
class Serving:
    """What the daemon of a state directory wrote just before it began to listen."""

    pid: int
    socket: Path
    simulate: str | None


def note_serving(state: Path, socket: Path, simulate: str | None) -> None:
    """Write where this daemon listens, for commands that look elsewhere."""
    text = json.dumps({"pid": os.getpid(), "socket": str(socket), "simulate": simulate})
    # The daemon can serve without, as on a full disk.
    with suppress(OSError):
        fresh = state / f"{SERVING}.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(state / SERVING)


def serving(state: Path) -> Serving | None:
    """Return what the last daemon of `state` wrote; it may have ended."""
    try:
        found = json.loads((state / SERVING).read_text(encoding="utf-8"))
        return Serving(int(found["pid"]), Path(found["socket"]), found["simulate"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def answering(socket: Path, state: Path, answers: Answers) -> Path | None:
    """Return where the user's daemon answers: on `socket`, or where it was started.

    The sessions of a user may have different sockets: a cron job has no XDG_RUNTIME_DIR.
    """
    if answers(socket):
        return socket
    last = serving(state)
    return last.socket if last and last.socket != socket and answers(last.socket) else None


def daemon_command() -> list[str]:
    """Return the command line of a daemon for the caller alone.

    Raises:
        NoDaemon: the packages of the daemon are not installed.
    """
    if (message := complaint("start a daemon for you")) is not None:
        raise NoDaemon(message, f"{INSTALL_HINT}, or ask an admin for a daemon for everyone")
    return [sys.executable, "-P", "-m", "gpulease.daemon", "--personal"]


def ensure(
    socket: Path,
    state: Path,
    answers: Answers,
    command: Sequence[str],
    within: float = START_WITHIN,
) -> tuple[Path, bool]:
    """Return where a daemon answers, and whether this call started it.

    Raises:
        NoDaemon: none answers within so many seconds; the message is that of the daemon.
    """
    deadline = time.monotonic() + within
    private_folder(socket.parent, "start a daemon for you")
    private_folder(state, "start a daemon for you")

    def served() -> Path | None:
        return answering(socket, state, answers)

    with _start_lock(socket.parent / "starting.lock", served, deadline) as others:
        if found := others or served():
            return found, False
        return _Start(command, state).until(served, deadline)


def private_folder(folder: Path, purpose: str) -> None:
    """Create a directory that only the caller can enter; one that is there must be the caller's.

    Raises:
        NoDaemon: another user controls it; the message says that `purpose` cannot be done.
    """
    # In /tmp another user may have created the directory to receive the environment of jobs.
    # Checked before mkdir too: root must not create directories where other users can write.
    why = shaky(folder, os.geteuid())
    if why is None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = shaky(folder, os.geteuid())
    if why is not None:
        raise NoDaemon(
            f"cannot {purpose}: {why}",
            "ask an admin to remove it, or set XDG_RUNTIME_DIR (for the socket) and "
            "XDG_STATE_HOME (for the database) to directories of your own",
        )


@contextmanager
def _start_lock(
    lock: Path, served: Callable[[], Path | None], deadline: float
) -> Iterator[Path | None]:
    """Wait for the lock and yield None, or yield where a daemon answers in the meantime."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        found = None
        while not _lock(handle) and (found := served()) is None:
            if time.monotonic() > deadline:
                raise NoDaemon(
                    "cannot reach a daemon: another command is starting one, and it does not "
                    "answer",
                    "gpulease doctor shows what is wrong",
                )
            time.sleep(_POLL_EVERY)
        yield found
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Start:
    """The start of a daemon, repeated if the former daemon was still ending."""

    def __init__(self, command: Sequence[str], state: Path) -> None:
        self._command = command
        self._state = state
        self._log = state / PERSONAL_LOG
        self._launch()

    def until(self, served: Callable[[], Path | None], deadline: float) -> tuple[Path, bool]:
        while (found := served()) is None:
            if self._process is not None and self._process.poll() is not None:
                self._wait_or_fail(served)
            elif self._process is None and not self._held():
                self._launch()
            elif time.monotonic() > deadline:
                self._fail_for_silence()
            time.sleep(_POLL_EVERY)
        if self._process is None:
            return found, False
        last = serving(self._state)
        pid = self._process.pid
        self._process.returncode = 0  # It outlives this process, of which Popen would warn.
        # A daemon whose socket was gone may have listened again before the new one did.
        return found, last is not None and last.pid == pid

    def _launch(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self._log, flags, 0o600)
        try:
            self._log_size = os.fstat(handle).st_size
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                env=own_environment(os.environ),
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(handle)

    def _wait_or_fail(self, served: Callable[[], Path | None]) -> None:
        """Wait for a daemon that runs and does not listen now; any other end is a failure.

        Its socket may have been removed with XDG_RUNTIME_DIR: it creates that again in seconds.
        """
        message, hint = self._failure()
        if IN_USE in message:
            self._process = None
            return
        # A daemon that was started by hand at the same moment makes ours end, and then answers.
        deadline = time.monotonic() + _ANSWERS_AFTER
        while not served():
            if time.monotonic() > deadline:
                raise NoDaemon(f"cannot start a daemon for you: {message}", hint)
            time.sleep(_POLL_EVERY)

    def _held(self) -> bool:
        try:
            handle = os.open(self._state / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not _lock(handle)
        finally:
            os.close(handle)

    def _fail_for_silence(self) -> None:
        if self._process is None:
            last = serving(self._state)
            raise NoDaemon(
                "cannot reach your daemon: it runs, but does not listen",
                f"see its log: {self._log}"
                + (f"; to end it: kill {last.pid}; running jobs continue" if last else ""),
            )
        self._process.kill()
        self._process.wait()
        raise NoDaemon(
            "cannot start a daemon for you: it does not answer", f"see its log: {self._log}"
        )

    def _failure(self) -> tuple[str, str | None]:
        """Return the last message of the daemon, and its hint if there is one."""
        with self._log.open("rb") as handle:
            handle.seek(max(self._log_size, self._log.stat().st_size - _LOG_TAIL))
            text = handle.read().decode(errors="replace").strip()
        before, mark, hint = text.rpartition("\n\nhint: ")
        lines = (before if mark else text).splitlines() or ["it ended without a message"]
        return lines[-1], hint if mark else f"see its log: {self._log}"
