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
from typing import Any, BinaryIO

FAILED = 1
"""The exit status of a call that raised an exception, or of one that nobody waits for."""


def main(folder: Path, number: str) -> int:
    """Make the call, and return the exit status of the job."""
    try:
        # Without a reader, the process of the executor has ended: ENXIO, or no such file.
        events = os.open(folder / "events", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return _abandon(folder)
    job = os.environ["GPULEASE_JOB"]  # the function may change it
    threading.Thread(target=_end_with_caller, args=(events, folder), daemon=True).start()
    _tell(events, f"started {number}")
    with (folder / f"{number}.call").open("rb") as file:
        pickler, preparation = pickle.load(file)  # noqa: S301  written by the caller
        outcome = _outcome(file, preparation)
    _write(folder / f"{number}.result", _pickled(job, outcome, import_module(pickler).dumps))
    _tell(events, f"ended {number}")
    return 0 if outcome[0] == "value" else FAILED


def _abandon(folder: Path) -> int:
    sys.stderr.write("gpulease: not called: the process that waited for the result has ended\n")
    shutil.rmtree(folder, ignore_errors=True)
    return FAILED


def _end_with_caller(events: int, folder: Path) -> None:
    """End this job as soon as nobody reads `events` any more."""
    poller = select.poll()
    poller.register(events, 0)  # POLLERR is always reported
    poller.poll()
    _abandon(folder)
    os.killpg(0, signal.SIGTERM)


def _tell(events: int, text: str) -> None:
    with suppress(OSError):  # the caller also asks the daemon from time to time
        os.write(events, f"{text}\n".encode())


def _outcome(file: BinaryIO, preparation: dict[str, Any]) -> tuple[str, Any, str]:
    """Return "value" or "error", the value or the exception, and its traceback."""
    try:
        spawn.prepare(preparation)
        function, args, keywords = pickle.load(file)  # noqa: S301  written by the caller
        return "value", function(*args, **keywords), ""
    except BaseException as error:  # noqa: BLE001  whatever it is belongs to the caller
        traceback.print_exc()
        return "error", error, traceback.format_exc()


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


def _write(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
