"""The private folder that takes calls to their jobs, and events and outcomes back.

It has a file for each call, one for each outcome, and a FIFO. The FIFO has a reader as long as the
process of the executor lives: its jobs see its end even if it is killed.
"""

import fcntl
import os
import pickle
import select
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from gpulease.errors import BadValue, CallFailed, GpuleaseError
from gpulease.lease_api import call_main

_NOT_PASSED_ON = ("authkey", "start_method")
"""What multiprocessing prepares besides, for its own processes."""
_MAIN = ("init_main_from_name", "init_main_from_path")
_WAKE = b"\n"


class RemoteTraceback(Exception):
    """The traceback of an exception in a job; it is the cause of the exception here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call returned, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None


class CallFiles:
    """The folder of one executor."""

    def __init__(self) -> None:
        """Make the folder.

        Raises:
            GpuleaseError: it cannot be made, or others could replace it.
        """
        self.pid = os.getpid()
        self.folder = _new_folder()
        # Opened for writing as well, so that it never reports the end of the file.
        self._events = os.open(self.folder / "events", os.O_RDWR | os.O_NONBLOCK)
        self._incomplete = b""
        self._open, self._is_open = threading.Lock(), True
        # systemd-tmpfiles spares folders that are locked like this, however old their files are.
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        _open_folders.add(self)

    def close_in_child(self) -> None:
        """Close what a forked child inherits, or the calls would not end with this process."""
        self._open = threading.Lock()  # another thread may have held it
        if self._is_open:
            self._is_open = False
            os.close(self._events)
            os.close(self._lock)

    def command(self, number: int) -> list[str]:
        """Return the command of the job that makes a call."""
        return [sys.executable, "-u", call_main.__file__, str(self.folder), str(number)]

    def write(self, number: int, function: Callable[..., Any], call: tuple[Any, ...]) -> None:
        """Store a call: its function, and the tuple of its arguments and that of its keywords.

        Raises:
            BadValue: it cannot be pickled.
            GpuleaseError: it cannot be written.
        """
        name = "cloudpickle" if find_spec("cloudpickle") else "pickle"
        # What a new Python needs to import the same modules as this one. cloudpickle has the
        # functions of the main script as a whole, so that it is not imported.
        without = (*_NOT_PASSED_ON, *(_MAIN if name == "cloudpickle" else ()))
        data: dict[str, Any] = spawn.get_preparation_data("gpulease")
        preparation = {key: value for key, value in data.items() if key not in without}
        in_main = getattr(function, "__module__", None) == "__main__"
        if name == "pickle" and in_main and not any(key in preparation for key in _MAIN):
            why = "it was defined interactively, and its job could not import it"
            raise _not_picklable(function, why, name)
        try:
            pickled = __import__(name).dumps((function, *call))
        except Exception as error:
            raise _not_picklable(function, str(error), name) from error
        head = pickle.dumps((name, preparation))
        part = self.folder / f"{number}.part"
        try:
            part.write_bytes(head + pickled)
            part.rename(part.with_suffix(".call"))
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _unusable(f"submit {name_of(function)}", self.folder, error.strerror) from error

    def outcome(self, number: int, job: int) -> Outcome | None:
        """Return the outcome of a call; None if its job left none."""
        try:
            content = _read_own(self.folder / f"{number}.result")
        except FileNotFoundError:
            return None
        try:
            by, kind, what, text = pickle.loads(content)  # noqa: S301  by a job of this user
        except Exception as error:  # noqa: BLE001  classes unpickle themselves as they like
            why = f"its result cannot be unpickled: {error}"
            by, kind, what, text = str(job), "lost", why, str(error)
        if by != str(job):
            return None  # an earlier attempt, which ran out of memory
        if kind == "value":
            return Outcome(value=what)
        if kind == "lost":
            what = CallFailed(f"cannot get the result of job {job}: {what}")
            what.job = job
        what.__cause__ = RemoteTraceback(text)
        return Outcome(error=what)

    def forget(self, number: int) -> None:
        """Remove the files of a call."""
        for kind in ("call", "result", "part"):
            (self.folder / f"{number}.{kind}").unlink(missing_ok=True)

    def wake(self) -> None:
        """Make `news` return."""
        with self._open, suppress(BlockingIOError):
            if self._is_open:
                os.write(self._events, _WAKE)

    def news(self, timeout: float) -> list[tuple[str, int]]:
        """Return which calls have "started" or "ended", after `timeout` seconds at most."""
        select.select([self._events], [], [], timeout)
        with suppress(BlockingIOError):
            while piece := os.read(self._events, 1 << 16):
                self._incomplete += piece
        *lines, self._incomplete = self._incomplete.split(b"\n")
        words = [line.decode().split() for line in lines if line]
        return [(kind, int(number)) for kind, number in words]

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with self._open:
            self._is_open = False
            os.close(self._events)
            os.close(self._lock)


_open_folders: "weakref.WeakSet[CallFiles]" = weakref.WeakSet()


def _close_in_child() -> None:
    for files in list(_open_folders):
        files.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def _new_folder() -> Path:
    """Return a new folder with a FIFO.

    Raises:
        GpuleaseError: it cannot be made, or others could replace it.
    """
    doing = "make an Executor"
    try:
        parent = Path(tempfile.gettempdir())
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _unusable(doing, parent, "every user can replace files there (no sticky bit)")
        folder = Path(tempfile.mkdtemp(prefix="gpulease-executor-"))
        os.mkfifo(folder / "events", 0o600)
    except OSError as error:
        where = Path(error.filename or os.environ.get("TMPDIR", "/tmp"))  # noqa: S108
        raise _unusable(doing, where, error.strerror) from error
    return folder


def _unusable(doing: str, path: Path, why: str | None) -> GpuleaseError:
    return GpuleaseError(
        f"cannot {doing}: {path}: {why}",
        "set TMPDIR to a folder that only you can write to and that has space",
    )


def _read_own(path: Path) -> bytes:
    """Return the content of a file of this user.

    Raises:
        FileNotFoundError: there is none; a file of another user counts as none.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise FileNotFoundError(f"{path} is of another user")
        return file.read()


def name_of(function: Callable[..., Any]) -> str:
    """Return what to call a function in messages and listings."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _not_picklable(function: Callable[..., Any], why: str, pickler: str) -> BadValue:
    hint = "pass only arguments that can be pickled"
    if pickler == "pickle":
        hint = "install cloudpickle, or define the function at the top level of a module"
    return BadValue(f"cannot submit {name_of(function)}: {why}", hint)
