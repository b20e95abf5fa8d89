"""Which processes are servers of CUDA's MPS, on whose account the memory of other programs stands.

A program is such a server by its name, and only if its file belongs to root or to who asks, and the
process is in our user namespace: else anybody could call a program so, to have what it uses taken
for that of the jobs beside it. In a user namespace of one's own one may mount any program under any
name, and out of it nobody comes back (user_namespaces(7)).
"""

import os
from collections.abc import Iterable
from pathlib import Path

_NAME = "nvidia-cuda-mps-server"


def mps_servers(pids: Iterable[int]) -> frozenset[int]:
    """Return those of `pids` that are MPS servers, as far as this user may see."""
    return frozenset(pid for pid in pids if _is_server(pid))


def _is_server(pid: int) -> bool:
    program = Path(f"/proc/{pid}/exe")
    try:
        name = program.readlink().name.removesuffix(" (deleted)")
        if name != _NAME or program.stat().st_uid not in (0, os.geteuid()):
            return False
        return (
            Path(f"/proc/{pid}/ns/user").stat().st_ino == Path("/proc/self/ns/user").stat().st_ino
        )
    except OSError:
        return False
