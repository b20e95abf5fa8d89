"""Reports to the daemon: what a hook limits or could not limit, and what its pools hold.

The first report of a hook is sent at once, since the process may end before a thread runs: the
daemon shows a lease as limited by the framework only after it. A thread sends again what the daemon
did not take, and what pools hold from time to time. Nothing waits longer than the timeouts below,
and the script notices nothing: the thread takes no signals, raises nothing, and ends with the
interpreter. A forked process starts another if it uses a framework. The daemon does not trust the
reports beyond what they say about their owner's jobs.
"""

import atexit
import json
import os
import signal
import socket
import threading
from typing import Any, Callable

from .lease import Lease

Steps = Callable[[], "tuple[int, float]"]
Pools = Callable[[], "list[dict[str, Any]]"]

FIRST_PAUSES = (0.5, 1.0, 2.0, 5.0)
PAUSE = 10.0
"""Seconds between reports: the first few, then all others."""
TIMEOUT = 2.0
TIMEOUT_OF_LIMIT = 0.2
TIMEOUT_OF_FAILURE = 1.0
"""Seconds that the script waits for the daemon, for each kind of first report."""
LARGEST_ANSWER = 4096
MOST_PENDING = 16
SIGNALS = frozenset(range(1, signal.NSIG)) - {32, 33}
"""All but those of the C library; Python 3.7 has no signal.valid_signals."""
LONGEST_WHY = 500
FINAL = (b"403", b"404", b"405")
"""Status codes of a daemon that takes no reports from this job, or none at all."""


class _Reporter:
    """The reports of one process: those not delivered yet, and the functions that measure pools."""

    def __init__(self, lease: "Lease") -> None:
        self.pid = os.getpid()
        self.sources: "dict[str, tuple[str, Pools]]" = {}
        self.steps: "tuple[str, Steps] | None" = None
        self._lease = lease
        self._said: "dict[tuple[str, str], dict[str, Any]]" = {}
        self._pending: "list[dict[str, Any]]" = []
        self._runs = False
        self._stopped = threading.Event()

    def say(self, content: "dict[str, Any]", timeout: float) -> None:
        """Send a report now, once; the thread sends it later if the daemon does not answer."""
        key = content["framework"], content["state"]
        if self._said.get(key) == content:
            return
        self._said[key] = content
        if not self._pending and _send(self._lease, content, timeout) is not None:
            return
        if len(self._pending) < MOST_PENDING:
            self._pending.append(content)
        self.start()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._runs:
            return
        self._runs = True
        threading.Thread(target=self._run, name="gpulease-report", daemon=True).start()
        atexit.register(self._finish)

    def _finish(self) -> None:
        """Send the last figures; the thread must not be inside a framework after that."""
        self._stopped.set()
        if self.pid == os.getpid() and not self._lease.lifted:
            try:
                self._report(TIMEOUT_OF_LIMIT)
            except Exception:  # noqa: BLE001  (the script has ended as it wanted to)
                return

    def _run(self) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            pauses = list(FIRST_PAUSES)
            while not self._stopped.wait(pauses.pop(0) if pauses else PAUSE):
                if self._lease.lifted or not self._report():
                    return
        except BaseException:  # noqa: BLE001  (the script must not notice the thread)
            return

    def _report(self, timeout: float = TIMEOUT) -> bool:
        """Send what is pending, then one report for each framework; return whether to continue."""
        while self._pending:
            delivered = _send(self._lease, self._pending[0], timeout)
            if delivered is None:
                return True
            del self._pending[0]
            if not delivered:
                return False
        for framework, (version, pools) in list(self.sources.items()):
            try:
                found = pools()
            except Exception:  # noqa: BLE001  (an unknown version of a framework)
                continue
            content = {"framework": framework, "version": version, "gpus": found}
            if found and _send(self._lease, content, timeout) is False:
                return False
        return self.steps is None or self._report_steps(*self.steps, timeout=timeout)

    def _report_steps(self, version: str, steps: "Steps", timeout: float) -> bool:
        count, seconds = steps()
        content = {
            "framework": "keras",
            "version": version,
            "gpus": [],
            "steps": count,
            "seconds": seconds,
        }
        return _send(self._lease, content, timeout) is not False


_reporter: "_Reporter | None" = None


def _reporter_of(lease: "Lease") -> "_Reporter | None":
    """Return the reporter of this process; None if it does not report."""
    global _reporter
    if not lease.daemon or os.environ.get("GPULEASE_REPORT") == "0":
        return None
    if _reporter is None or _reporter.pid != os.getpid():
        _reporter = _Reporter(lease)
    return _reporter


def begin(
    lease: "Lease",
    framework: str,
    version: str,
    pools: "Pools",
    limits: "list[dict[str, Any]] | None" = None,
) -> None:
    """Report that the hook limits `framework` in this process, and from now on its pools.

    `limits` has {"gpu": UUID, "limit": bytes} of each GPU that it limits; None: the pools of the
    lease on all visible GPUs. `pools` returns the same with "pool" and "peak", in bytes.
    """
    try:
        reporter = _reporter_of(lease)
        if reporter is None:
            return
        if limits is None:
            gpus = lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            sizes = [None if lease.simulated else lease.limit(framework, gpu) for gpu in gpus]
            limits = [{"gpu": gpu["uuid"], "limit": size} for gpu, size in zip(gpus, sizes)]
        content = {
            "framework": framework,
            "version": str(version),
            "gpus": limits,
            "state": "limited",
        }
        reporter.sources[framework] = str(version), pools
        reporter.say(content, TIMEOUT_OF_LIMIT)
        reporter.start()
    except Exception:  # noqa: BLE001  (no thread can be started)
        return


def count(lease: "Lease", version: str, steps: "Steps") -> None:
    """Report from now on what `steps` returns: training steps, and the seconds that they took."""
    try:
        reporter = _reporter_of(lease)
        if reporter is not None:
            reporter.steps = str(version), steps
            reporter.start()
    except Exception:  # noqa: BLE001  (as above)
        return


def failed(lease: "Lease", framework: str, version: str, why: str) -> None:
    """Report that the hook could not limit `framework` in this process; "" for all frameworks."""
    try:
        reporter = _reporter_of(lease)
        if reporter is not None:
            content = {
                "framework": framework,
                "version": str(version),
                "gpus": [],
                "state": "failed",
                "why": why[:LONGEST_WHY],
            }
            reporter.say(content, TIMEOUT_OF_FAILURE)
    except Exception:  # noqa: BLE001  (as above)
        return


def _send(lease: "Lease", content: "dict[str, Any]", timeout: float) -> "bool | None":
    """Post a report; return None if no daemon took it, False if it takes none from this job."""
    body = json.dumps(content).encode()
    head = (
        "POST /v1/jobs/{}/usage HTTP/1.1\r\nHost: gpulease\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    ).format(lease.job, len(body))
    folder, name = os.path.split(lease.daemon)
    try:
        # Through a descriptor: a socket address is shorter than some paths.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(timeout)
            asking.connect("/proc/self/fd/%d/%s" % (fd, name))
            asking.sendall(head.encode() + body)
            answer = asking.recv(LARGEST_ANSWER)
    except OSError:
        return None  # the daemon restarts or is busy
    finally:
        os.close(fd)
    status = answer[9:12]
    if status in FINAL:
        return False
    # Busy (429) and errors of the daemon (5xx) pass; what it calls wrong (400) stays wrong.
    return None if status == b"429" or not status or status.startswith(b"5") else True
