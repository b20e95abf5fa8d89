"""The main program of a job of `gpulease.Executor`: make one call, and leave its outcome in a file.

Usage: python call_main.py FOLDER NUMBER

It runs in the Python of the caller with the standard library only, so that the function finds its
modules as it would in a child process of `multiprocessing`. `call_files` is the other side.
"""

import os
import pickle
import select
import shutil
import signal
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing import spawn
from pathlib import Path
from typing import Any

FAILED = 1
"""The exit status of a call that raised an exception, or of one that nobody waits for."""


def main(folder: Path, number: str) -> int:
    """Make the call, and return the exit status of the job."""
    if not _tell(folder, f"started {number}"):
        return _abandon(folder)
    job, pid = os.environ["GPULEASE_JOB"], os.getpid()  # the function may change them
    threading.Thread(target=_end_with_caller, args=(folder,), daemon=True).start()
    pickler, outcome = _outcome(folder / f"{number}.call")
    if os.getpid() == pid:  # or else a child that the function forked has returned from it
        _write(folder / f"{number}.result", job, _pickled(job, outcome, pickler))
        _tell(folder, f"ended {number}")
    return 0 if outcome[0] == "value" else FAILED


def _abandon(folder: Path) -> int:
    sys.stderr.write("gpulease: not called: the process that waited for the result has ended\n")
    shutil.rmtree(folder, ignore_errors=True)
    return FAILED


def _end_with_caller(folder: Path) -> None:
    """End this job as soon as nobody reads the events any more."""
    poller = select.poll()
    with suppress(OSError):
        while True:
            events = _writer(folder)
            poller.register(events, 0)  # POLLERR is always reported
            if not any(state & select.POLLNVAL for _, state in poller.poll()):
                break
            poller.unregister(events)  # the function has closed it
    _abandon(folder)
    os.killpg(0, signal.SIGTERM)


def _writer(folder: Path) -> int:
    """Open the events; without a reader, the process of the executor has ended.

    Raises:
        OSError: there is no reader, or no such file.
    """
    return os.open(folder / "events", os.O_WRONLY | os.O_NONBLOCK)


def _tell(folder: Path, text: str) -> bool:
    """Send a line to the caller; return False if it has ended."""
    try:
        events = _writer(folder)
    except OSError:
        return False
    with suppress(OSError):  # the caller also asks the daemon from time to time
        os.write(events, f"{text}\n".encode())
    os.close(events)
    return True


def _outcome(path: Path) -> tuple[Any, tuple[str, Any, str]]:
    """Make the call of a file; return the function that pickles, and the outcome.

    The outcome is "value" or "error", the value or the exception, and its traceback.
    """
    pid, dumps = os.getpid(), pickle.dumps
    try:
        # The function may close any file, so none is open when it is called.
        with path.open("rb") as file:
            pickler, preparation = pickle.load(file)  # noqa: S301  written by the caller
            dumps = import_module(pickler).dumps
            spawn.prepare(preparation)
            function, args, keywords = pickle.load(file)  # noqa: S301  written by the caller
        return dumps, ("value", function(*args, **keywords), "")
    except BaseException as error:  # whatever it is belongs to the caller
        if os.getpid() != pid:
            raise
        traceback.print_exc()
        return dumps, ("error", error, traceback.format_exc())


def _pickled(job: str, outcome: tuple[str, Any, str], dumps: Any) -> bytes:
    kind, content, text = outcome
    if kind == "error" and not isinstance(content, Exception):
        # SystemExit or KeyboardInterrupt would end the caller.
        return pickle.dumps((job, "lost", f"the call raised {content!r}", text))
    try:
        pickled: bytes = dumps((job, *outcome))
        if kind == "error":
            pickle.loads(pickled)  # noqa: S301  some exceptions cannot be loaded again
    except Exception as error:  # noqa: BLE001  classes pickle themselves as they like
        if kind == "error":
            why = traceback.format_exception_only(content)[-1].strip()
        else:
            why = f"its result cannot be pickled: {error}"
            traceback.print_exc()
        return pickle.dumps((job, "lost", why, text or traceback.format_exc()))
    return pickled


def _write(path: Path, job: str, content: bytes) -> None:
    part = path.with_suffix(".part")
    try:
        part.write_bytes(content)
    except OSError as error:
        part.unlink(missing_ok=True)
        traceback.print_exc()
        why = f"its result cannot be written to {path.parent}: {error.strerror}; see TMPDIR"
        part.write_bytes(pickle.dumps((job, "lost", why, traceback.format_exc())))
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
