"""What jobs say of themselves, and which of their processes live: nothing of it is gpulease's.

Each job appends lines to a file of its own; each of its processes carries the job's mark in its
environment or in its arguments.
"""

from collections import Counter
from pathlib import Path

MARK = b"TORTURE_JOB="
_NEEDLE = b"torture-"


def entries(ledger: Path) -> Counter[str]:
    """Return how often a job has written each word."""
    try:
        return Counter(ledger.read_text().split())
    except FileNotFoundError:
        return Counter()


def living() -> dict[str, set[int]]:
    """Return the living processes of each job, by its mark."""
    found: dict[str, set[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (mark := _mark(folder)) is not None:
            found.setdefault(mark, set()).add(int(folder.name))
    return found


def _mark(process: Path) -> str | None:
    try:
        strings = (process / "environ").read_bytes().split(b"\0")
        for string in strings:
            if string.startswith(MARK):
                return _unless_zombie(process, string.removeprefix(MARK))
        for string in (process / "cmdline").read_bytes().split(b"\0"):
            if string.startswith(_NEEDLE):
                return _unless_zombie(process, string)
    except OSError:
        pass
    return None


def _unless_zombie(process: Path, mark: bytes) -> str | None:
    state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    return None if state in "ZX" else mark.decode()
