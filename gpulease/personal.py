"""Start a daemon for one user, where the machine has none.

However many commands want one at once, one is started: they queue for a lock beside the socket,
which the kernel drops with whoever holds it. How to tell that a daemon answers is the caller's.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpulease.errors import NoDaemon

STARTS_WITHIN = 60.0
"""Seconds for a daemon to answer; it takes two on an idle machine."""
_LOOKS_EVERY = 0.05
_LAST_WORDS = 4000
"""Bytes of the log in which a daemon's reason for leaving is looked for."""

Answers = Callable[[Path], bool]


def daemon_command() -> list[str]:
    """Return the command line of a daemon of the caller's own."""
    return [sys.executable, "-m", "gpulease.daemon", "--personal"]


def ensure(
    socket: Path,
    log: Path,
    answers: Answers,
    command: Sequence[str],
    within: float = STARTS_WITHIN,
) -> bool:
    """Return once a daemon answers on `socket`; tell whether this call started it.

    Raises:
        NoDaemon: it did not come up within so many seconds; the message is the daemon's own.
    """
    deadline = time.monotonic() + within
    _private_folder(socket.parent)
    _private_folder(log.parent)
    with _turn(socket.parent / "starting.lock", lambda: answers(socket), deadline) as first:
        if not first or answers(socket):
            return False
        said_before = log.stat().st_size if log.exists() else 0
        process = _start(command, log)
        _await(process, lambda: answers(socket), deadline, lambda: _last_words(log, said_before))
        process.returncode = 0  # It outlives us on purpose; Popen would complain of that.
        return True


def _private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    # A folder in /tmp may have been laid by someone who would like to be given our environment.
    if found.st_uid != os.geteuid():
        raise NoDaemon(
            f"cannot start a daemon for you: {folder} belongs to user {found.st_uid}",
            "set XDG_RUNTIME_DIR to a directory of your own",
        )


@contextmanager
def _turn(lock: Path, served: Callable[[], bool], deadline: float) -> Iterator[bool]:
    """Wait for the lock and yield True, or False as soon as another's daemon answers."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield _locked_before(handle, served, deadline)
    finally:
        os.close(handle)


def _locked_before(handle: int, served: Callable[[], bool], deadline: float) -> bool:
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if served():
                return False
            time.sleep(_LOOKS_EVERY)
        else:
            return True
    raise NoDaemon(
        "cannot reach a daemon: another command is starting one, and it does not come up",
        "gpulease doctor shows what is wrong",
    )


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=handle,
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(handle)
    return process


def _await(
    process: subprocess.Popen[bytes],
    served: Callable[[], bool],
    deadline: float,
    last_words: Callable[[], tuple[str, str | None]],
) -> None:
    while not served():
        # One that was started by hand at the same moment makes ours leave, and then answers.
        if process.poll() is not None and not _served_soon(served):
            message, hint = last_words()
            raise NoDaemon(f"cannot start a daemon for you: {message}", hint)
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise NoDaemon(
                "cannot start a daemon for you: it does not answer", "gpulease doctor shows why"
            )
        time.sleep(_LOOKS_EVERY)


def _served_soon(served: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if served():
            return True
        time.sleep(_LOOKS_EVERY)
    return False


def _last_words(log: Path, since: int) -> tuple[str, str | None]:
    """Return what the daemon said as it left: its sentence, and its hint if it gave one."""
    with log.open("rb") as handle:
        handle.seek(max(since, log.stat().st_size - _LAST_WORDS))
        said = handle.read().decode(errors="replace").strip()
    before, mark, hint = said.rpartition("\n\nhint: ")
    lines = (before if mark else said).splitlines() or ["it left without a word"]
    return lines[-1], hint if mark else f"its log is {log}"
