"""Which processes are servers of CUDA's MPS, on whose account the memory of other programs stands.

A program is such a server by its name, and only if it is root's process, or one that runs the file
of that name where nobody but root, or who asks, could have put it: else anybody could call a
program so, to have what it uses taken for that of the jobs beside it. The name alone says nothing:
in a mount namespace of one's own one may mount any program under any name (user_namespaces(7)), and
run it from outside through /proc/PID/root.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

_NAME = "nvidia-cuda-mps-server"


def mps_servers(pids: Iterable[int]) -> frozenset[int]:
    """Return those of `pids` that are MPS servers, as far as this user may see."""
    return frozenset(pid for pid in pids if _is_server(pid))


def _is_server(pid: int) -> bool:
    link = Path(f"/proc/{pid}/exe")
    try:
        program = link.readlink()
        if program.name.removesuffix(" (deleted)") != _NAME or not _is_of_our_users(pid):
            return False
        # The path first: what belongs to others may lie on a file system that never answers.
        return _is_root(pid) or (_is_closed(program) and program.samefile(link))
    except OSError:
        return False


def _is_of_our_users(pid: int) -> bool:
    """Whether its users are ours, and not those of a namespace that anybody may make."""
    return Path(f"/proc/{pid}/ns/user").stat().st_ino == Path("/proc/self/ns/user").stat().st_ino


def _is_root(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
        if line.startswith(b"Uid:"):
            # Real, effective, saved and for files: a program that is setuid has them apart.
            return set(line.split()[1:]) == {b"0"}
    return False


def _is_closed(program: Path) -> bool:
    """Whether nobody but root and our user could put another file where `program` is."""
    for each in (*reversed(program.parents), program):
        found = each.lstat()
        if found.st_uid not in (0, os.geteuid()) or stat.S_ISLNK(found.st_mode):
            return False
        # In /tmp and the like others add what they please, and change nothing that is there.
        sticky = found.st_mode & stat.S_ISVTX and each != program.parent
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            return False
    return True
