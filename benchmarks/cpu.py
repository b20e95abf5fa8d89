"""The CPU time of a process and of all that it starts, also of those that nobody reaps."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_HIERARCHIES = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


@contextlib.contextmanager
def counted(pid: int) -> Iterator[Callable[[], float] | None]:
    """Count the CPU time of a process and of all that it starts from now on, in seconds.

    Yields None where no cgroup of version 2 can be made, which takes root.
    """
    place = next((each for each in _HIERARCHIES if (each / "cgroup.procs").exists()), None)
    if place is None or os.geteuid() != 0:
        yield None
        return
    group = Path(tempfile.mkdtemp(prefix="gpulease-bench-", dir=place))
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield lambda: _used_s(group)
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (place / "cgroup.procs").write_text(left)
        group.rmdir()


def _used_s(group: Path) -> float:
    fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(fields["usage_usec"]) / 1e6
