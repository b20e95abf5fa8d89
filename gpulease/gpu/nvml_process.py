"""Reads the GPUs in a separate process, after a crash in NVML has ended the daemon.

If NVML crashes again, it ends that process alone. While there is none, all GPUs are unreadable, and
jobs continue. Memory limits of the driver are not set this way: they are calls of NVML as well.
"""

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from gpulease.call_thread import Retry
from gpulease.daemon_packages import own_environment
from gpulease.domain.gpu import Fault, GpuReading
from gpulease.domain.health import HealthReport
from gpulease.errors import NoGpus
from gpulease.gpu.nvml import NvmlProbe

_LONGEST_PAUSE = timedelta(minutes=5)
"""Between two processes: each initialises NVML."""
_READ, _HEALTH, _LIST = "read", "health", "list"
_STARTS_WITHIN = timedelta(seconds=15)
_ANSWERS_WITHIN_S = 25.0
"""Longer than a reading takes; the unit's WatchdogSec is longer than two."""


class NvmlProcess:
    """The GPUs as a process that calls NVML shows them. May be used from several threads."""

    def __init__(
        self,
        deadline: timedelta,
        *,
        first_retry: timedelta = timedelta(seconds=2),
    ) -> None:
        """`deadline` is for every call of the driver, as in NvmlProbe.open."""
        self._deadline = deadline
        self._lock = threading.Lock()
        """Held from a question to its answer."""
        self._retry = Retry(first_retry)
        self._process: subprocess.Popen[bytes] | None = None
        self._known: tuple[GpuReading, ...] = ()
        self._versions: tuple[str | None, str | None] = None, None
        self._trouble: str | None = None

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of every GPU; those last read, with a fault, while none can be read."""
        with self._lock:
            try:
                self._known, self._versions = self._ask(_READ)
            except NoGpus as error:
                return tuple(_unreadable(each, error.message) for each in self._known)
            self._trouble = None
            self._retry.reset()
            return self._known

    def driver(self) -> str | None:
        """Return the driver's version when it was last read."""
        return self._versions[0]

    def library(self) -> str | None:
        """Return the version of NVML when it was last read."""
        return self._versions[1]

    def health(self) -> Sequence[HealthReport]:
        """Return the reports about the GPUs' health since the last call, unless it is in use."""
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            return () if self._process is None else tuple(self._ask(_HEALTH))
        except NoGpus:
            return ()
        finally:
            self._lock.release()

    def restriction(self) -> str:
        """Return what is different from NvmlProbe, and why no GPU can be read now."""
        text = "NVML crashed gpuleased, so a separate process calls it, and sets no memory limits"
        return text if self._trouble is None else f"{text}; {self._trouble}"

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, question: str) -> Any:
        """Return the answer of the process; start one if that is due.

        Raises:
            NoGpus: there is none.
        """
        if self._process is None:
            if self._trouble is not None and not self._retry.is_due:
                raise NoGpus(self._trouble)
            self._retry.start()
            deadline = str(self._deadline.total_seconds())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-m", __name__, deadline],
                env=own_environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._known = self._ask(_LIST) or self._known
        try:
            answer = _answer(self._process, question)
        except (OSError, EOFError, pickle.UnpicklingError):
            answer = None
        if isinstance(answer, tuple):
            return answer
        ended = _how(self._end())
        self._trouble = answer or f"the process that calls NVML {ended}; another one is tried"
        self._retry.schedule(_LONGEST_PAUSE)
        raise NoGpus(self._trouble)

    def _end(self) -> int:
        """Kill the process, and return how it ended."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.kill()
        with process:
            return process.wait()


def _answer(process: "subprocess.Popen[bytes]", question: str) -> Any:
    """Return a tuple, or as text why no GPU can be read."""
    assert process.stdin is not None
    assert process.stdout is not None
    # Not buffered: what a process that has ended did not read would be written again on closing.
    os.write(process.stdin.fileno(), f"{question}\n".encode())
    if not select.select([process.stdout], [], [], _ANSWERS_WITHIN_S)[0]:
        raise TimeoutError
    return pickle.load(process.stdout)  # noqa: S301 - from this program's own child


def _how(status: int) -> str:
    if status == -signal.SIGKILL:
        return "did not answer"
    return f"crashed ({signal.Signals(-status).name})" if status < 0 else f"exited with {status}"


def _unreadable(known: GpuReading, why: str) -> GpuReading:
    return replace(
        known, fault=Fault.UNREADABLE, detail=why, compute_mode=None, processes=None,
        total=None, used=None, reserved=None,
        utilization=None, temperature=None, power=None, power_limit=None,
    )  # fmt: skip


def main() -> None:
    """Answer each line of stdin with a pickled tuple, or with a text if no GPU can be read."""
    try:
        probe = NvmlProbe.open(timedelta(seconds=float(sys.argv[1])), start_timeout=_STARTS_WITHIN)
    except NoGpus as error:
        _write(error.message)
        return
    for line in sys.stdin:
        if line == f"{_HEALTH}\n":
            _write(tuple(probe.health()))
        elif line == f"{_LIST}\n":
            _write(probe.unreadable("not read yet"))
        else:
            _write((probe.read(), (probe.driver(), probe.library())))
    probe.close()


def _write(answer: object) -> None:
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
