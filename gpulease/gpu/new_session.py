"""Finds out, in a separate process, which GPUs a new session of NVML can read.

A GPU that is lost to the daemon's session may answer in a new one. While a GPU is lost,
initialising NVML may take long or never return, and the daemon would have to end its session first.
So a short-lived process tries it while the daemon keeps reading the other GPUs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

from gpulease.call_thread import Call, CallThread, Retry
from gpulease.daemon_packages import own_environment
from gpulease.domain.gpu import GpuUuid
from gpulease.gpu import nvml_binding
from gpulease.gpu.devices import list_devices
from gpulease.gpu.reading import read_gpu

_TIMEOUT = timedelta(minutes=2)
"""For the process to initialise NVML and read the GPUs."""
_LONGEST_PAUSE = timedelta(minutes=5)
"""Between two processes: each makes the driver probe its GPUs."""


class NewSession:
    """Starts one such process from time to time while a GPU cannot be read."""

    def __init__(self, first_retry: timedelta) -> None:
        self._retry = Retry(first_retry)
        self._thread: CallThread[Mapping[GpuUuid, int]] = CallThread("nvml-new-session")
        self._call: Call[Mapping[GpuUuid, int]] | None = None

    def poll(self) -> Mapping[GpuUuid, int]:
        """Return the result of the latest process, once, and start another if one is due.

        Does not block. The result is the index of each readable GPU, by UUID.
        """
        if self._call is None:
            if self._retry.is_due:
                self._retry.start()
                self._call = self._thread.submit(partial(readable_gpus, _TIMEOUT))
            return {}
        if not self._call.outcome.done():
            return {}
        found, self._call = self._call.outcome.result(), None
        return found

    def schedule(self) -> None:
        """Plan a process, after a pause that grows with each attempt."""
        self._retry.schedule(_LONGEST_PAUSE)

    def cancel(self) -> None:
        """Plan none: all GPUs can be read."""
        self._retry.reset()

    def close(self) -> None:
        """Let the thread end."""
        self._thread.close()


def readable_gpus(timeout: timedelta) -> Mapping[GpuUuid, int]:
    """Return the index of each GPU that a new session can read, by UUID; empty on failure."""
    seconds = max(1, round(timeout.total_seconds()))
    command = [sys.executable, "-P", "-m", "gpulease.gpu.new_session", str(seconds)]
    try:
        done = subprocess.run(
            command,
            env=own_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=timeout.total_seconds(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return {GpuUuid(uuid): int(index) for index, _, uuid in lines if index.isdecimal()}


def main() -> None:
    """Initialise NVML, and write the index and the UUID of each readable GPU."""
    # The kernel ends this process even if the call hangs and the daemon has gone.
    signal.alarm(int(sys.argv[1]))
    nvml_binding.start()
    for device in list_devices():
        if read_gpu(device).fault is None:
            sys.stdout.write(f"{device.index} {device.uuid}\n")


if __name__ == "__main__":
    main()
