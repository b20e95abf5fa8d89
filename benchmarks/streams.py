"""A stream through a job, `gpulease run -- cat < big > copy`, and `cat big | cat > copy`.

`python -m benchmarks streams` takes a GiB; `python -m benchmarks.streams 256M` another size.
"""

import filecmp
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.daemon import Running, running
from benchmarks.timing import seconds
from gpulease.units import format_size, parse_size

SIZE = 1 << 30
TIMES = 3
_PIECE = 4 << 20


def run(size: int = SIZE) -> Iterator[str]:
    """Compare the two, alternating, with the same bytes, and check the copy."""
    with running() as daemon, tempfile.TemporaryDirectory(prefix="gpulease-streams-") as name:
        big, copy = Path(name, "big"), Path(name, "copy")
        _fill(big, size)
        pairs = [(_through_job(daemon, big, copy), _plain(big, copy)) for _ in range(TIMES)]
        for ours, plain in pairs:
            yield f"{ours:.2f} s through a job, {plain:.2f} s through a pipe: {plain / ours:.2f}"
        ratio = statistics.median(plain / ours for ours, plain in pairs)
        yield f"{format_size(size)} through a job, at {ratio:.2f} times the speed of a pipe"


def _fill(path: Path, size: int) -> None:
    piece = os.urandom(_PIECE)
    with path.open("wb") as file:
        for left in range(size, 0, -_PIECE):
            file.write(piece[: min(left, _PIECE)])
        file.flush()
        os.fsync(file.fileno())  # or the first to be timed shares the disk with what is left of it


def _through_job(daemon: Running, big: Path, copy: Path) -> float:
    copy.unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpulease.cli", "run", "--mem", "1G", "--", "cat"]
    with big.open("rb") as source, copy.open("wb") as target:
        taken = seconds(
            lambda: subprocess.run(command, stdin=source, stdout=target, env=daemon.env, check=True)
        )
    if not filecmp.cmp(big, copy, shallow=False):
        raise SystemExit("the copy that went through a job is not what went in")
    return taken


def _plain(big: Path, copy: Path) -> float:
    copy.unlink(missing_ok=True)
    line = 'cat "$1" | cat > "$2"'
    return seconds(lambda: subprocess.run(["sh", "-c", line, "-", big, copy], check=True))


if __name__ == "__main__":
    for each in run(parse_size(sys.argv[1]) if sys.argv[1:] else SIZE):
        print(each, flush=True)
