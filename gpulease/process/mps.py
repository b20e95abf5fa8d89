"""Which processes are servers of CUDA's MPS, on whose account the memory of other programs stands.

A program is such a server by its name, and only if its file belongs to root or to who asks: else
anybody could call a program so, to have what it uses taken for that of the jobs beside it.
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
        return name == _NAME and program.stat().st_uid in (0, os.geteuid())
    except OSError:
        return False
