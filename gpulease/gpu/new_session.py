"""Finds out, in a process of its own, which GPUs a new session of NVML can read.

A GPU that is lost to the session of the daemon may answer again in a new one. While a GPU is lost,
initialising NVML may take long or never return, and a session can only be renewed by ending the old
one first. So a short-lived process tries it, and the daemon keeps reading the other GPUs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

from gpulease.domain.gpu import GpuUuid
from gpulease.gpu import nvml_binding
from gpulease.gpu.call_thread import Call, CallThread, Monotonic, Retry
from gpulease.gpu.devices import list_devices
from gpulease.gpu.reading import read_gpu

_WITHIN = timedelta(minutes=2)
"""Time that NVML has to be initialised and read in that process."""
_LONGEST_PAUSE = timedelta(minutes=5)
"""Between two such processes: each makes the driver look for its GPUs."""


class NewSession:
    """Starts such a process now and then, for as long as a GPU cannot be read; one at a time."""

    def __init__(self, first_retry: timedelta, clock: Monotonic) -> None:
        self._retry = Retry(first_retry, clock)
        self._lane: CallThread[Mapping[GpuUuid, int]] = CallThread("nvml-new-session", clock)
        self._call: Call[Mapping[GpuUuid, int]] | None = None

    def poll(self) -> Mapping[GpuUuid, int]:
        """Return what the latest process has found, once, and start another if that is due.

        Waits for nothing. The answer is the index of each GPU that could be read, by UUID.
        """
        if self._call is None:
            if self._retry.is_due:
                self._retry.begun()
                self._call = self._lane.ask(partial(readable_gpus, _WITHIN))
            return {}
        if not self._call.outcome.done():
            return {}
        found, self._call = self._call.outcome.result(), None
        return found

    def wanted(self) -> None:
        """Plan a process, after a pause that grows from one to the next."""
        self._retry.wanted(_LONGEST_PAUSE)

    def needless(self) -> None:
        """Plan none: all GPUs are read."""
        self._retry.needless()

    def close(self) -> None:
        """Let the thread end."""
        self._lane.close()


def readable_gpus(within: timedelta) -> Mapping[GpuUuid, int]:
    """Return the index of each GPU that a new session can read, by UUID; none without an answer."""
    seconds = max(1, round(within.total_seconds()))
    # The code of this daemon, whatever lies in the current directory.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-P", "-m", "gpulease.gpu.new_session", str(seconds)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=within.total_seconds(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return {GpuUuid(uuid): int(index) for index, _, uuid in lines if index.isdecimal()}


def main() -> None:
    """Initialise NVML, and write the index and the UUID of each GPU that can be read."""
    # The kernel ends this process also where the call hangs and the daemon has gone meanwhile.
    signal.alarm(int(sys.argv[1]))
    nvml_binding.start()
    for device in list_devices():
        if read_gpu(device).fault is None:
            sys.stdout.write(f"{device.index} {device.uuid}\n")


if __name__ == "__main__":
    main()
