"""Say all that a process can find out about how it was started, as JSON on standard output."""

import json
import os
import resource
import stat
import sys
import termios
from pathlib import Path


def kind_of(fd: int) -> str:
    """Say what a descriptor is, without saying which."""
    mode = os.fstat(fd).st_mode
    if os.isatty(fd):
        return "terminal"
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFREG: "file", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "other")


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def descriptors() -> dict[int, str]:
    with os.scandir("/proc/self/fd") as names:
        held = [int(name.name) for name in names]
    # The listing names the descriptor that it was read through, which is closed by now.
    return {fd: kind_of(fd) for fd in held if is_open(fd)}


def status() -> dict[str, str]:
    """The kernel's own words on rights and signals."""
    wanted = {"SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"}
    wanted |= {"Seccomp", "Umask", "Uid", "Gid", "Groups"}
    with Path("/proc/self/status").open() as lines:
        pairs = (line.split(":", 1) for line in lines)
        return {name: rest.strip() for name, rest in pairs if name in wanted}


def terminal() -> list[object] | None:
    if not os.isatty(0):
        return None
    *flags, characters = termios.tcgetattr(0)
    size = os.get_terminal_size(0)
    return [*flags, [each[0] if isinstance(each, bytes) else each for each in characters], *size]


def session() -> dict[str, bool]:
    """How this process stands to its group, its session and its terminal."""
    own = {"leads its group": os.getpgrp() == os.getpid()}
    own["leads its session"] = os.getsid(0) == os.getpid()
    if os.isatty(0):
        own["is in the foreground"] = os.tcgetpgrp(0) == os.getpgrp()
    return own


def read(name: str) -> str:
    return Path(f"/proc/self/{name}").read_text().strip()


def limits() -> dict[str, tuple[int, int]]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


found = {
    "argv": sys.argv,
    "executable": os.path.realpath(f"/proc/{os.getpid()}/exe"),
    "cwd": str(Path.cwd()),
    "environment": {name: os.fsencode(text).hex() for name, text in os.environ.items()},
    "nice": os.nice(0),
    "status": status(),
    "limits": limits(),
    "descriptors": descriptors(),
    "terminal": terminal(),
    "session": session(),
    "oom_score_adj": read("oom_score_adj"),
    "timerslack_ns": read("timerslack_ns"),
    "scheduler": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
}
sys.stdout.write(json.dumps(found) + "\n")
