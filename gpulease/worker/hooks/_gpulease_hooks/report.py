"""Reports the memory pools of this process's frameworks to the daemon from time to time.

A thread starts when a framework first uses a GPU. Nothing waits for it: it takes no signals, raises
nothing, and ends with the interpreter. A forked process starts another if it uses a framework. The
daemon does not trust the reports beyond what they say about their owner's jobs.
"""

import atexit
import json
import os
import signal
import socket
import threading
from typing import Any, Callable

from .lease import Lease

Pools = Callable[[], "list[dict[str, Any]]"]

FIRST_PAUSES = (0.5, 1.0, 2.0, 5.0)
PAUSE = 10.0
"""Seconds between reports: the first few, then all others."""
TIMEOUT = 2.0
LARGEST_ANSWER = 4096
FINAL = (b"403", b"404", b"405")
"""Status codes of a daemon that takes no reports from this job, or none at all."""


class _Reporter:
    """The thread of one process, and the functions that measure the pools."""

    def __init__(self, lease: Lease) -> None:
        self.pid = os.getpid()
        self.sources: dict[str, tuple[str, Pools]] = {}
        self._lease = lease
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpulease-report", daemon=True).start()
        # The thread must not be inside a framework when the interpreter shuts down.
        atexit.register(self._stopped.set)

    def _run(self) -> None:
        try:
            # Python 3.8 and later warn about reserved numbers in the range.
            signals = getattr(signal, "valid_signals", lambda: range(1, signal.NSIG))
            signal.pthread_sigmask(signal.SIG_BLOCK, signals())
            pauses = list(FIRST_PAUSES)
            while not self._stopped.wait(pauses.pop(0) if pauses else PAUSE):
                if self._lease.lifted or not self._report():
                    return
        except BaseException:  # noqa: BLE001  (the script must not notice the thread)
            return

    def _report(self) -> bool:
        """Send one report for each framework; return whether to continue."""
        for framework, (version, pools) in list(self.sources.items()):
            try:
                found = pools()
            except Exception:  # noqa: BLE001  (an unknown version of a framework)
                continue
            if found and not self._stopped.is_set():
                content = {"framework": framework, "version": version, "gpus": found}
                if not _send(self._lease, json.dumps(content).encode()):
                    return False
        return True


_reporter: "_Reporter | None" = None


def begin(lease: Lease, framework: str, version: str, pools: Pools) -> None:
    """Report what `pools` returns from now on, one entry for each GPU; sizes in bytes."""
    global _reporter
    if not lease.daemon or os.environ.get("GPULEASE_REPORT") == "0":
        return
    try:
        if _reporter is None or _reporter.pid != os.getpid():
            _reporter = _Reporter(lease)
            _reporter.sources[framework] = str(version), pools
            _reporter.start()
        _reporter.sources[framework] = str(version), pools
    except Exception:  # noqa: BLE001  (no thread can be started)
        return


def _send(lease: Lease, body: bytes) -> bool:
    """Post a report; return False if the daemon takes no reports from this job."""
    head = (
        "POST /v1/jobs/{}/usage HTTP/1.1\r\nHost: gpulease\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    ).format(lease.job, len(body))
    folder, name = os.path.split(lease.daemon)
    try:
        # Through a descriptor: a socket address is shorter than some paths.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(TIMEOUT)
            asking.connect("/proc/self/fd/%d/%s" % (fd, name))
            asking.sendall(head.encode() + body)
            answer = asking.recv(LARGEST_ANSWER)
    except OSError:
        return True  # the daemon restarts or is busy
    finally:
        os.close(fd)
    return answer[9:12] not in FINAL
