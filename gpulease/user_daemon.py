"""Start a daemon for one user, where the machine has none, and find it again.

However many commands want one at once, one is started: they queue for a lock beside the socket,
which the kernel drops with whoever holds it. How to tell that a daemon answers is the caller's.
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
from gpulease.daemon_packages import INSTALL_HINT, complaint
from gpulease.errors import NoDaemon
from gpulease.path_ownership import shaky

STARTS_WITHIN = 60.0
"""Seconds for a daemon to answer; it takes two on an idle machine."""
LOCK = "lock"
"""Held by the daemon of a state directory, in that directory."""
IN_USE = "another gpuleased is using it"
"""How a daemon says that it leaves because another one holds that lock."""
SERVING = "serving.json"
"""Where in that directory its daemon leaves word of itself."""
_LOOKS_EVERY = 0.05
_LAST_WORDS = 4000
"""Bytes of the log in which a daemon's reason for leaving is looked for."""

Answers = Callable[[Path], bool]


@dataclass(frozen=True, slots=True)
class Serving:
    """What the daemon of a state directory left word of just before it began to listen."""

    pid: int
    socket: Path
    simulate: str | None


def note_serving(state: Path, socket: Path, simulate: str | None) -> None:
    """Leave word for commands that look for this daemon where it does not listen."""
    text = json.dumps({"pid": os.getpid(), "socket": str(socket), "simulate": simulate})
    # A full disk is no reason not to serve.
    with suppress(OSError):
        fresh = state / f"{SERVING}.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(state / SERVING)


def serving(state: Path) -> Serving | None:
    """Return the word that the last daemon of `state` left; it may have gone since."""
    try:
        told = json.loads((state / SERVING).read_text(encoding="utf-8"))
        return Serving(int(told["pid"]), Path(told["socket"]), told["simulate"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def answering(socket: Path, state: Path, answers: Answers) -> Path | None:
    """Return where the user's daemon answers: on `socket`, or where it was started to listen.

    Their sessions may disagree about `socket`: a cron job has no XDG_RUNTIME_DIR.
    """
    if answers(socket):
        return socket
    told = serving(state)
    return told.socket if told and told.socket != socket and answers(told.socket) else None


def daemon_command() -> list[str]:
    """Return the command line of a daemon for the caller alone.

    Raises:
        NoDaemon: the packages of the daemon are not installed.
    """
    if (message := complaint("start a daemon for you")) is not None:
        raise NoDaemon(message, f"{INSTALL_HINT}, or ask an admin for a daemon for everyone")
    return [sys.executable, "-m", "gpulease.daemon", "--personal"]


def ensure(
    socket: Path,
    state: Path,
    answers: Answers,
    command: Sequence[str],
    within: float = STARTS_WITHIN,
) -> tuple[Path, bool]:
    """Return where a daemon answers once one does, and whether this call started it.

    Raises:
        NoDaemon: none came up within so many seconds; the message is the daemon's own.
    """
    deadline = time.monotonic() + within
    _private_folder(socket.parent)
    _private_folder(state)

    def served() -> Path | None:
        return answering(socket, state, answers)

    with _turn(socket.parent / "starting.lock", served, deadline) as others:
        if found := others or served():
            return found, False
        return _Start(command, state).until(served, deadline)


def _private_folder(folder: Path) -> None:
    # A folder in /tmp may have been laid by someone who would like to be given our environment.
    # Looked at before as well: root must not make folders where somebody else has a say.
    why = shaky(folder, os.geteuid())
    if why is None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = shaky(folder, os.geteuid())
    if why is not None:
        raise NoDaemon(
            f"cannot start a daemon for you: {why}",
            "ask an admin to remove it, or set XDG_RUNTIME_DIR (for the socket) and "
            "XDG_STATE_HOME (for the record) to directories of your own",
        )


@contextmanager
def _turn(lock: Path, served: Callable[[], Path | None], deadline: float) -> Iterator[Path | None]:
    """Wait for the lock and yield None, or where another's daemon answers as soon as it does."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield _found_before_the_turn(handle, served, deadline)
    finally:
        os.close(handle)


def _found_before_the_turn(
    handle: int, served: Callable[[], Path | None], deadline: float
) -> Path | None:
    while time.monotonic() < deadline:
        if _lock(handle):
            return None
        if found := served():
            return found
        time.sleep(_LOOKS_EVERY)
    raise NoDaemon(
        "cannot reach a daemon: another command is starting one, and it does not come up",
        "gpulease doctor shows what is wrong",
    )


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Start:
    """One daemon on its way up, started again if it had to make way for one that was leaving."""

    def __init__(self, command: Sequence[str], state: Path) -> None:
        self._command = command
        self._state = state
        self._log = state / PERSONAL_LOG
        self._launch()

    def until(self, served: Callable[[], Path | None], deadline: float) -> tuple[Path, bool]:
        while (found := served()) is None:
            if self._process is not None and self._process.poll() is not None:
                self._give_way_or_fail(served)
            elif self._process is None and not self._held():
                self._launch()
            elif time.monotonic() > deadline:
                self._fail_for_silence()
            time.sleep(_LOOKS_EVERY)
        if self._process is None:
            return found, False
        told = serving(self._state)
        pid = self._process.pid
        self._process.returncode = 0  # It outlives us on purpose; Popen would complain of that.
        # One whose socket had gone may have come back while ours was on its way.
        return found, told is not None and told.pid == pid

    def _launch(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self._log, flags, 0o600)
        try:
            self._said_before = os.fstat(handle).st_size
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(handle)

    def _give_way_or_fail(self, served: Callable[[], Path | None]) -> None:
        """Wait on for a daemon that lives and does not listen now; any other end is a failure.

        Its socket may have been taken away with XDG_RUNTIME_DIR: it lays it anew within seconds.
        """
        message, hint = self._last_words()
        if IN_USE in message:
            self._process = None
        # One that was started by hand at the same moment makes ours leave, and then answers.
        elif not _soon(served):
            raise NoDaemon(f"cannot start a daemon for you: {message}", hint)

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
            told = serving(self._state)
            raise NoDaemon(
                "cannot reach your daemon: it lives and listens nowhere",
                f"its log says why: {self._log}"
                + (f"; to end it: kill {told.pid}; running jobs go on" if told else ""),
            )
        self._process.kill()
        self._process.wait()
        raise NoDaemon(
            "cannot start a daemon for you: it does not answer", f"its log says why: {self._log}"
        )

    def _last_words(self) -> tuple[str, str | None]:
        """Return what the daemon said as it left: its sentence, and its hint if it gave one."""
        with self._log.open("rb") as handle:
            handle.seek(max(self._said_before, self._log.stat().st_size - _LAST_WORDS))
            said = handle.read().decode(errors="replace").strip()
        before, mark, hint = said.rpartition("\n\nhint: ")
        lines = (before if mark else said).splitlines() or ["it left without a word"]
        return lines[-1], hint if mark else f"its log is {self._log}"


def _soon(served: Callable[[], Path | None]) -> bool:
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if served():
            return True
        time.sleep(_LOOKS_EVERY)
    return False
