"""Cgroups made by hand where this machine lets us: a scope without a systemd to make it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpulease.host import cgroups
from gpulease.host.cgroups import SLICE, scope_name


def unified() -> Path:
    """Return where cgroups of version 2 are, if they can be written; else skip the test."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, path, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(path, os.W_OK):
            return Path(path)
    pytest.skip("no cgroup of version 2 that can be written (root, /sys/fs/cgroup mounted rw)")


@contextmanager
def directory(path: Path) -> Iterator[Path]:
    """Make a cgroup, and end and remove all that is in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        pytest.skip(f"cannot make the cgroup {path}: {error}")
    try:
        yield path
    finally:
        kill_and_remove(path)
        with suppress(OSError):
            path.parent.rmdir()


def kill_and_remove(path: Path) -> None:
    below = sorted((Path(each) for each, _, _ in os.walk(path)), reverse=True)
    for each in below:
        (each / "cgroup.kill").write_text("1")
    for each in below:
        while (each / "cgroup.procs").read_text():
            pass
        each.rmdir()


@contextmanager
def scope() -> Iterator[tuple[int, Path]]:
    """Make the scope of a job that nobody else has, and return its number and directory."""
    job = 10**9 + secrets.randbelow(10**9)
    with directory(unified() / SLICE / scope_name(job)) as path:
        # The mounts are read once; this machine may have got one since.
        cgroups._mounts.cache_clear()
        yield job, path


def put(pid: int, path: Path) -> None:
    """Move a process."""
    (path / "cgroup.procs").write_text(str(pid))
