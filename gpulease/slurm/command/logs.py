"""`gpulease logs` on a cluster: the files with the output of jobs of Slurm.

slurmd writes that of a batch job to files that its owner named. That of a job in the foreground
goes to the srun that started it, and is kept nowhere.
"""

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from gpulease.cli.job_selection import Selection
from gpulease.cli.render import local_time, print_stderr, write_output
from gpulease.drawing.words import clean
from gpulease.errors import BadUsage, GpuleaseError, NoSuchJob, SlurmFailed, WrongState
from gpulease.locations import environment
from gpulease.output_tail import start_of_tail
from gpulease.slurm.command.job_control import Watch
from gpulease.slurm.command.jobs import state_of, view
from gpulease.slurm.command.selection import Row, is_array, labels, select
from gpulease.slurm.command.views import reason_of
from gpulease.slurm.commands import run_slurm
from gpulease.slurm.records import is_batch, is_number, stream_files
from gpulease.wire.frames import FrameKind

_PIECE = 1 << 16
_READ_EVERY_S = 0.25
_ASK_EVERY_S = 2.0
"""Asking costs slurmctld a list of jobs; looking at a file costs nothing."""


def print_logs(
    wanted: Selection, *, follow: bool, tail: int | None, stdout: bool, stderr: bool
) -> None:
    """Print the output of jobs; `stdout` or `stderr` alone means one stream."""
    try:
        found = select(wanted)
    except NoSuchJob:
        if not _print_forgotten(wanted, tail):
            raise
        return
    for job, rows in found.items():
        if is_array(job, rows):
            raise BadUsage(
                f"cannot print the output of array {job}: name one of its elements",
                f"such as {labels(rows)}",
            )
        if len(found) > 1:
            print_stderr(f"gpulease: output of job {job} ({clean(rows[0].get('name', ''))})")
        row = _started(job, rows[0], follow=follow)
        if row is not None:
            streams = _streams(job, row, tail, stdout=stdout, stderr=stderr)
            _print(job, row, streams, follow=follow)


def _print_forgotten(wanted: Selection, tail: int | None) -> bool:
    """Print what `gpulease run -d` kept of a job that Slurm has forgotten, if there is anything."""
    if len(wanted.words) != 1 or not is_number(wanted.words[0]):
        return False
    word, folder = wanted.words[0], output_directory()
    kinds = {".out": FrameKind.STDOUT, ".err": FrameKind.STDERR}
    printed = [
        _Stream(kind, folder / f"{word}{suffix}", word, tail).copy()
        for suffix, kind in kinds.items()
    ]
    return any(printed)


class _Stream:
    """A file that grows."""

    def __init__(self, kind: FrameKind, path: Path, job: str, tail: int | None) -> None:
        self.path = path
        self._kind, self._job, self._tail = kind, job, tail
        self._file: int | None = None
        self._at = 0

    def copy(self) -> bool:
        """Print what was added, and tell whether there is a file.

        One that was cut short, as when a job is queued again, is printed from its beginning.
        """
        if self._file is None:
            self._file = open_output(self.path, self._job)
            if self._file is None:
                return False
            if self._tail is not None:
                end = os.fstat(self._file).st_size
                self._at = start_of_tail(self._file, self._tail, end)
        if os.fstat(self._file).st_size < self._at:
            self._at = 0
        while piece := os.pread(self._file, _PIECE, self._at):
            self._at += len(piece)
            write_output(self._kind, piece)
        return True


def _started(job: str, row: Row, *, follow: bool) -> Row | None:
    """Return a job that has started, with `follow` as soon as it has; None if it waits."""
    if state_of(row) == "queued":
        why = reason_of(view(row, 0), local_time())
        text = f"gpulease: job {job} has not started; it waits{f': {why}' if why else ''}"
        print_stderr(text)
    watch = Watch()
    while state_of(row) == "queued":
        if not follow:
            return None
        time.sleep(_ASK_EVERY_S)
        row = watch.look_at(job, row)
    return row


def _streams(
    job: str, row: Row, tail: int | None, *, stdout: bool, stderr: bool
) -> Sequence[_Stream]:
    files, both = output_of(job, row), stdout == stderr
    if len(files) == 1:
        if not both:
            print_stderr(f"gpulease: job {job} writes both streams to one file")
        both = True
    asked = ((FrameKind.STDOUT, stdout or both), (FrameKind.STDERR, stderr or both))
    return [
        _Stream(kind, path, job, tail)
        for path, (kind, is_asked) in zip(files, asked, strict=False)
        if is_asked
    ]


def _print(job: str, row: Row, streams: Sequence[_Stream], *, follow: bool) -> None:
    """Print the files, with `follow` until the job has ended."""
    asked, is_last, warned, watch = time.monotonic(), False, False, Watch()
    while True:
        missing = [stream.path for stream in streams if not stream.copy()]
        if missing and not warned:
            error = unreadable(missing[0], job, row.get("nodelist"), "no such file on this machine")
            if not follow or state_of(row) == "ended":
                raise error
            print_stderr(f"gpulease: {error.message}; hint: {error.hint}")
            warned = True
        if not follow or is_last:
            return
        is_last = state_of(row) == "ended"
        time.sleep(_READ_EVERY_S)
        if not is_last and time.monotonic() - asked > _ASK_EVERY_S:
            row, asked = watch.look_at(job, row), time.monotonic()


def output_directory() -> Path:
    """Return where `gpulease run -d` has Slurm write output: in the home, which nodes may share."""
    home = environment().get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "gpulease" / "slurm"


def output_of(job: str, row: Row) -> Sequence[Path]:
    """Return the files of stdout and stderr of a job, or the one that has both.

    They need not exist, or not here.

    Raises:
        SlurmFailed: Slurm does not answer.
        WrongState: the output is kept nowhere.
    """
    if not is_batch(row.get("batchflag", "")):
        raise WrongState(
            f"cannot print the output of job {row['jobid']}: it goes to the command that started "
            "it, and is not kept",
            f"gpulease attach {job} shows what follows while it runs; gpulease run -d writes files",
        )
    stdout, stderr = stream_files(run_slurm(["scontrol", "show", "job", job]))
    if stdout is None:
        raise WrongState(f"cannot print the output of job {job}: Slurm names no file for it")
    return [Path(each) for each in dict.fromkeys((stdout, stderr)) if each is not None]


def described(job: str, row: Row) -> str | None:
    """Return the names of the files for people; None if there are none."""
    try:
        return ", ".join(clean(str(path)) for path in output_of(job, row))
    except (SlurmFailed, WrongState):
        return None


def open_output(path: Path, job: str) -> int | None:
    """Open a file with output; None if there is none here.

    Raises:
        WrongState: it cannot be read here.
    """
    try:
        # The owner of a job names its files: a FIFO must not block who reads them.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, job, None, error.strerror or str(error)) from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise unreadable(path, job, None, "it is not a regular file")
    return opened


def unreadable(path: Path, job: str, node: str | None, why: str) -> GpuleaseError:
    """Return the error for output that is not readable on this machine."""
    shown = clean(str(path))
    hint = None
    if node:
        hint = (
            f"if homes are not shared, it is on {clean(node)}: "
            f"srun --overlap --jobid={job} cat {shown} prints it while the job runs"
        )
    return WrongState(f"cannot print the output of job {job}: {shown}: {why}", hint)
