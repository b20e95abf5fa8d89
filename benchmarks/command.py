"""How long everyday commands take, compared with the start of Python."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.daemon import running
from benchmarks.figures import Figure
from benchmarks.timing import paired, seconds
from gpulease.cli import __main__ as script

_TIMES = 15
_RUN = ("run", "--mem", "1G", "--")
_LINES: Sequence[tuple[tuple[str, ...], float]] = (
    (("--version",), 2),
    (("status",), 4),
    (("list",), 4),
    (("show", "1"), 4),
    (("run", "-d", "--mem", "1G", "true"), 4),
    ((*_RUN, "true"), 4),
    (("wait", "1"), 3.5),
    (("logs", "1"), 3.5),
    (("extend", "2", "+1s"), 3.5),
    (("hold", "--mem", "1G", "--pid", "PID", "--json"), 3.5),
    (("__complete", "show", ""), 3.5),
    (("__complete", "run", "--"), 3.5),
    (("report",), 5),
    (("run", "--dry-run", "--mem", "1G", "true"), 6),
    (("--help",), 8),
    (("run", "--help"), 4),
    (("drain", "0"), 4),
    (("reserve",), 4),
)
"""What is measured, to exit, and the goal: a multiple of the start of Python.

Job 1 has ended, job 2 runs, and PID is a process without a lease.
"""


def run() -> Iterator[Figure]:
    """Measure the installed script, each verb in alternation with `python -c pass`."""
    with running() as daemon, TemporaryDirectory(prefix="gpulease-bench-") as folder:
        gpulease = installed(Path(folder))

        def command(*line: str) -> None:
            subprocess.run([gpulease, *line], check=True, capture_output=True, env=daemon.env)

        holders = [subprocess.Popen(["sleep", "3600"]) for _ in range(_TIMES)]
        pids = iter([str(each.pid) for each in holders])

        def measured(line: Sequence[str]) -> None:
            command(*(next(pids) if word == "PID" else word for word in line))

        command(*_RUN, "true")
        command("run", "-d", "--mem", "1G", "--time", "1h", "--", "sleep", "3600")
        for line, goal in _LINES:
            ours, python = paired(lambda line=line: measured(line), _python, _TIMES)
            yield _figure(f"gpulease {' '.join(line)}", ours, python, goal)
        command("cancel", "2")
        for holder in holders:
            holder.kill()
            holder.wait()
        both = [
            (_until_first_code([gpulease, *_RUN], Path(folder, "started"), daemon.env),
             seconds(_python))
            for _ in range(_TIMES)
        ]  # fmt: skip
        ours, python = (statistics.median(each) for each in zip(*both, strict=True))
        yield _figure("gpulease run, to the first code of the job", ours, python, 3)


def _until_first_code(run: Sequence[str | Path], started: Path, env: Mapping[str, str]) -> float:
    """Return the seconds from the start of `run` to the moment when its job makes a file."""
    started.unlink(missing_ok=True)
    begun = time.perf_counter()
    with subprocess.Popen([*run, "touch", started], env=env, stderr=subprocess.DEVNULL):
        while not started.exists():
            time.sleep(0.0005)
        return time.perf_counter() - begun


def installed(folder: Path) -> Path:
    """Write the script as pip installs it."""
    path = folder / "gpulease"
    _, _, rest = Path(script.__file__).read_text(encoding="utf-8").partition("\n")
    path.write_text(f"#!{sys.executable}\n{rest}", encoding="utf-8")
    path.chmod(0o755)
    return path


def _python() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def _figure(what: str, ours: float, python: float, goal: float) -> Figure:
    return Figure(what, ours * 1e3, "ms", goal, python * 1e3, "python -c pass")
