"""Tell the daemon now and then what the pools of the frameworks in this process hold.

A thread that begins when a framework first uses a GPU, and that nothing waits for: it takes no
signal, raises nothing, and ends with the interpreter. A process that was forked begins anew if it
uses a framework itself. The daemon takes what comes here for its owner's word and no more.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import threading
from typing import Any, Callable

from .lease import Lease

Pools = Callable[[], "list[dict[str, Any]]"]

PAUSES = (0.5, 1.0, 2.0, 5.0)
REST = 10.0
"""Seconds between reports, the first few and then."""
ANSWER_WITHIN = 2.0
LARGEST_ANSWER = 4096
NEVER = (b"403", b"404", b"405")
"""Status codes of a daemon that wants no report from here: another one's job, an older version."""


class _Reporter:
    """The thread of one process, and what it asks."""

    def __init__(self, lease: Lease) -> None:
        self.pid = os.getpid()
        self.sources: dict[str, tuple[str, Pools]] = {}
        self._lease = lease
        self._over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpulease-report", daemon=True).start()
        # An interpreter that is being taken down must not find us inside a framework.
        atexit.register(self._over.set)

    def _run(self) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            pauses = list(PAUSES)
            while not self._over.wait(pauses.pop(0) if pauses else REST):
                if self._lease.lifted or not self._report():
                    return
        except BaseException:  # noqa: BLE001  (nothing of ours may show in the script)
            return

    def _report(self) -> bool:
        """Send one report for each framework; return whether to go on."""
        for framework, (version, pools) in list(self.sources.items()):
            try:
                found = pools()
            except Exception:  # noqa: BLE001  (it may be a framework that we do not know)
                continue
            if found and not self._over.is_set():
                content = {"framework": framework, "version": version, "gpus": found}
                if not _send(self._lease, json.dumps(content).encode()):
                    return False
        return True


_reporter: _Reporter | None = None


def begin(lease: Lease, framework: str, version: str, pools: Pools) -> None:
    """Report what `pools` returns from now on; in each process once."""
    global _reporter
    if not lease.daemon or os.environ.get("GPULEASE_REPORT") == "0":
        return
    try:
        if _reporter is None or _reporter.pid != os.getpid():
            _reporter = _Reporter(lease)
            _reporter.sources[framework] = str(version), pools
            _reporter.start()
        _reporter.sources[framework] = str(version), pools
    except Exception:  # noqa: BLE001  (no threads to be had, say)
        return


def _send(lease: Lease, body: bytes) -> bool:
    """Post a report; return False where the daemon wants none from here, ever."""
    head = (
        "POST /v1/jobs/{}/usage HTTP/1.1\r\nHost: gpulease\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    ).format(lease.job, len(body))
    folder, name = os.path.split(lease.daemon)
    try:
        # Through a descriptor: the address of a socket is short, and the path may be long.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(ANSWER_WITHIN)
            asking.connect("/proc/self/fd/%d/%s" % (fd, name))
            asking.sendall(head.encode() + body)
            answer = asking.recv(LARGEST_ANSWER)
    except OSError:
        return True  # it is away for a restart, or has much to do
    finally:
        os.close(fd)
    return answer[9:12] not in NEVER
