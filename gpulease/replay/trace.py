"""What a replay reads and writes: traces of jobs, servers, and when and where jobs ran.

A trace is a CSV file, compressed if its name ends in .gz. Times are seconds on any one clock. Every
error names the line, since traces are written by scripts of their users.
"""

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NoReturn

from gpulease.domain.job import CommandFingerprint
from gpulease.errors import BadValue
from gpulease.units import MIB, format_size, parse_size

COLUMNS = ("job", "submit_s", "duration_s", "gpus", "memory_mib", "user", "time_limit_s")
OPTIONAL = ("utilization", "command")
RUN_COLUMNS = ("job", "start_s", "end_s", "server", "gpus")
_FORMAT = f"the first line names the columns: {','.join(COLUMNS)}"
_LARGEST_TIME_S = 1e10
"""After the year 2286 in seconds since 1970: a larger number is in another unit."""
_SHORTEST_S = 0.001
_LONGEST_S = 10 * 365 * 86400.0
_LARGEST_MIB = 1 << 30
_MOST_GPUS = 1024
_SERVERS = re.compile(r"(?:(\d+)x)?(\d+)x(\d[^x]*)", re.ASCII | re.IGNORECASE)
_MOST_SERVERS = 10_000


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace. Times are seconds from the beginning of the trace."""

    id: int
    """Ascending in the order of submission, as the daemon gives them."""
    submit_s: float
    duration_s: float
    """How long it runs when it shares no GPU."""
    gpus: int
    memory: int
    """Bytes on each GPU."""
    user: str
    time_limit_s: float | None = None
    utilization: float | None = None
    """The part of the time, 0 to 1, in which it keeps each of its GPUs busy; None if unknown."""
    command: CommandFingerprint | None = None
    """Runs of the same command have the same; None if unknown."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server of the replay."""

    gpus: int
    memory: int
    """Bytes of each GPU that can be leased."""


@dataclass(frozen=True, slots=True)
class Run:
    """When and where a job ran. Times are seconds from the beginning of the trace."""

    job: TraceJob
    start_s: float
    end_s: float
    server: int
    """Its position in the sequence of servers."""
    gpus: tuple[int, ...]
    """Their numbers on that server, from 0."""

    @property
    def wait_s(self) -> float:
        """Seconds from its submission to its start."""
        return self.start_s - self.job.submit_s

    @property
    def completion_s(self) -> float:
        """Seconds from its submission to its end."""
        return self.end_s - self.job.submit_s


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a trace in the order of their submission, and how the file names them."""

    jobs: tuple[TraceJob, ...]
    names: Mapping[int, str]
    """The text in the column `job`, by the id of the job."""

    def without(self, left_out: Iterable[TraceJob]) -> "Trace":
        """Return the trace without some jobs."""
        ids = {job.id for job in left_out}
        return Trace(tuple(job for job in self.jobs if job.id not in ids), self.names)


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        BadValue: the file cannot be read, or a line of it is wrong.
    """
    try:
        with _opened(path) as lines:
            named = sorted(_rows(lines, path), key=lambda each: each[1].submit_s)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise BadValue(f"cannot read the trace {path}: {why}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadValue(
            f"cannot read the trace {path}: it is no CSV file: {error}",
            f"write it in UTF-8, with commas; {_FORMAT}",
        ) from error
    jobs = tuple(replace(job, id=number) for number, (_, job) in enumerate(named, 1))
    return Trace(jobs, {number: name for number, (name, _) in enumerate(named, 1)})


def _opened(path: Path) -> IO[str]:
    # Spreadsheets begin UTF-8 with a byte order mark.
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), "utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(file: IO[str], path: Path) -> Iterator[tuple[str, TraceJob]]:
    """Yield the name and the job of each line below the header; the jobs have no id yet.

    Raises:
        BadValue: a line is wrong, or there is no job.
    """
    lines = csv.reader(file, strict=True)
    header = [name.strip().lower() for name in next(lines, [])]
    _check_header(header, path)
    seen: dict[str, int] = {}
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        line = _Line(path, lines.line_num, dict(zip(header, cells, strict=False)))
        if len(cells) != len(header):
            line.refuse(f"it has {len(cells)} values, and there are {len(header)} columns")
        name, job = line.required("job"), line.job()
        if name in seen:
            line.refuse(f"job {_shown(name)} is in line {seen[name]} already")
        seen[name] = lines.line_num
        yield name, job
    if not seen:
        raise BadValue(f"cannot replay {path}: it has no jobs", _FORMAT)


def _check_header(header: Sequence[str], path: Path) -> None:
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise BadValue(f"cannot read the trace {path}: no column {', '.join(missing)}", _FORMAT)
    for name in (*COLUMNS, *OPTIONAL):
        if header.count(name) > 1:
            raise BadValue(f"cannot read the trace {path}: two columns {name}")


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a trace, by column."""

    path: Path
    number: int
    cells: Mapping[str, str]

    def job(self) -> TraceJob:
        command = self._text("command")
        return TraceJob(
            id=0,
            submit_s=self._number("submit_s", -_LARGEST_TIME_S, _LARGEST_TIME_S, _SECONDS),
            duration_s=self._number("duration_s", 0, _LONGEST_S, _SECONDS),
            gpus=self._gpus(),
            memory=int(self._number("memory_mib", 1, _LARGEST_MIB, _MEMORY) * MIB),
            user=self.required("user"),
            time_limit_s=self._optional("time_limit_s", _SHORTEST_S, _LONGEST_S, _LIMIT),
            utilization=self._optional("utilization", 0, 1, "35% is 0.35; empty is unknown"),
            # Runs of the same script are similar, whatever follows.
            command=CommandFingerprint(command.split()[0], command) if command else None,
        )

    def refuse(self, why: str, hint: str | None = None) -> NoReturn:
        raise BadValue(f"cannot read line {self.number} of {self.path}: {why}", hint)

    def _text(self, column: str) -> str:
        return self.cells.get(column, "").strip()

    def required(self, column: str) -> str:
        text = self._text(column)
        if not text:
            self.refuse(f"{column} is empty")
        return text

    def _gpus(self) -> int:
        hint = "a part of one GPU is 1 GPU with less memory; leave out jobs without GPUs"
        number = self._number("gpus", 1, _MOST_GPUS, hint)
        if number != int(number):
            self.refuse(f"gpus is {self._text('gpus')}, not a whole number", hint)
        return int(number)

    def _optional(self, column: str, least: float, most: float, hint: str) -> float | None:
        return self._number(column, least, most, hint) if self._text(column) else None

    def _number(self, column: str, least: float, most: float, hint: str) -> float:
        text = self.required(column)
        try:
            number = float(text)
        except ValueError:
            self.refuse(f"{column} is {_shown(text)}, not a number", hint)
        if not math.isfinite(number) or not least <= number <= most:
            self.refuse(f"{column} is {_shown(text)}, not from {least:.10g} to {most:.10g}", hint)
        return number


_SECONDS = "times are seconds, such as 90 or 90.5"
_MEMORY = "memory_mib is the memory on each GPU: 24 GiB are 24576"
_LIMIT = "times are seconds; an empty time_limit_s is no limit"


def _shown(text: str) -> str:
    return repr(text[:40])


def parse_servers(text: str) -> tuple[Server, ...]:
    """Read servers: 6x8x24G are six servers with eight GPUs of 24 GiB, 2x24G is one with two.

    Several kinds are separated by commas.

    Raises:
        BadValue: `text` describes no servers.
    """
    hint = "write --servers 6x8x24G: 6 servers, each with 8 GPUs of 24 GiB; 2x24G is one server"
    servers: list[Server] = []
    for part in text.split(","):
        found = _SERVERS.fullmatch(part.strip())
        if found is None:
            raise BadValue(f"cannot read the servers {_shown(text)}", hint)
        count, gpus = int(found[1] or 1), int(found[2])
        if not (0 < count <= _MOST_SERVERS - len(servers) and 0 < gpus <= _MOST_GPUS):
            raise BadValue(f"cannot use the servers {_shown(text)}: a number is out of range", hint)
        servers += [Server(gpus, parse_size(found[3]))] * count
    return tuple(servers)


def too_large(trace: Trace, servers: Sequence[Server]) -> list[TraceJob]:
    """Return the jobs that fit on none of the servers."""
    return [
        job
        for job in trace.jobs
        if not any(job.gpus <= each.gpus and job.memory <= each.memory for each in servers)
    ]


def refuse_too_large(trace: Trace, jobs: Sequence[TraceJob]) -> None:
    """Refuse a replay in which `jobs`, if any, could never start.

    Raises:
        BadValue: there are such jobs.
    """
    if not jobs:
        return
    first = jobs[0]
    others = f"; this job and {len(jobs) - 1} more are too large" if len(jobs) > 1 else ""
    times = f"{first.gpus} x " if first.gpus > 1 else ""
    raise BadValue(
        f"cannot replay job {trace.names[first.id]}: its {times}{format_size(first.memory)} "
        f"fit on no server{others}",
        "give larger --servers, or leave such jobs out with --skip-too-large",
    )


def write_runs(path: Path, runs: Sequence[Run], trace: Trace) -> None:
    """Write when and where each job ran: servers and GPUs by number, from 0.

    Raises:
        BadValue: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(RUN_COLUMNS)
            for run in runs:
                gpus = ";".join(map(str, run.gpus))
                name = trace.names[run.job.id]
                writer.writerow(
                    (name, _seconds(run.start_s), _seconds(run.end_s), run.server, gpus)
                )
    except OSError as error:
        raise BadValue(f"cannot write {path}: {error.strerror}") from error


def _seconds(span: float) -> str:
    return f"{span:.3f}".rstrip("0").rstrip(".")
