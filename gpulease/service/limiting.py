"""What the use cases need of the driver's own memory limits, as a Protocol."""

from pathlib import Path
from typing import Protocol

from gpulease.domain.memory import GpuUuid


class NotLimited(Exception):
    """The driver keeps no limit of ours on a cgroup; the text says why, for people."""


class MemoryLimiter(Protocol):
    """The driver's own memory limits, on cgroups of version 2; each call blocks for a while."""

    def obstacle(self, gpu: GpuUuid, cgroup: Path) -> str | None:
        """Return why no limit can be had on this GPU, asking about any cgroup; None: it can.

        Raises:
            NotLimited: there is no telling now.
        """

    def limit(self, gpu: GpuUuid, cgroup: Path, memory: int) -> int:
        """Let the processes of a cgroup hold at most `memory` bytes; return what is kept to.

        Raises:
            NotLimited: it is not in force.
        """

    def kept(self, gpu: GpuUuid, cgroup: Path) -> int | None:
        """Return the limit that the driver keeps a cgroup to now, in bytes; None: to none.

        Raises:
            NotLimited: there is no telling.
        """

    def lift(self, gpu: GpuUuid, cgroup: Path) -> None:
        """Take the limits of a cgroup away.

        Raises:
            NotLimited: they could not be.
        """
