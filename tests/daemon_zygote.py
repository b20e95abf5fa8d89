"""Starts daemons quickly: imports gpulease once, and forks for each.

`python -m daemon_zygote` reads a line of JSON from stdin for each daemon: its arguments, its
environment, its log. Writes its pid to stdout.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import apscheduler.schedulers.asyncio
import uvicorn.protocols.http.httptools_impl
from sqlalchemy.orm import configure_mappers

from gpulease.daemon.main import main
from gpulease.shim.linux import die_with_parent

LOADED_LATE = (apscheduler.schedulers.asyncio, uvicorn.protocols)


def _be_daemon(wanted: dict[str, object], prepare: Callable[[], None]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Whatever becomes of the tests, no daemon of theirs stays.
    die_with_parent(signal.SIGKILL)
    os.environ.clear()
    os.environ.update(wanted["environment"])  # type: ignore[call-overload]
    log = os.open(str(wanted["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, fd in ((0, null), (1, log), (2, log)):
        os.dup2(fd, target)
    os.close(log)
    os.close(null)
    os.chdir("/")
    _load_driver()
    prepare()
    try:
        main(wanted["arguments"])  # type: ignore[arg-type]
    except SystemExit as end:
        # As the interpreter does, which would go on to free, page by page, what all daemons share.
        threading._shutdown()  # type: ignore[attr-defined]
        os._exit(end.code if isinstance(end.code, int) else 1)


def _load_driver() -> None:
    """Load the driver that LD_LIBRARY_PATH has: the loader read that before there was any."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        library = Path(folder, "libnvidia-ml.so.1")
        if folder and library.exists():
            ctypes.CDLL(str(library))


def serve(prepare: Callable[[], None] = lambda: None) -> None:
    """Start daemons until the end of the input; `prepare` is called in each."""
    die_with_parent(signal.SIGKILL)
    # Nobody waits for them: the tests hold a descriptor of each.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # What each daemon would do at its start, once for all of them.
    configure_mappers()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            _be_daemon(json.loads(line), prepare)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
