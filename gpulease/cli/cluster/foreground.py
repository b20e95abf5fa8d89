"""`gpulease run` in the foreground on a cluster: srun, and again if the node refuses the job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gpulease.cli.cluster.job_end import JobEnd
from gpulease.cli.cluster.srun import Srun
from gpulease.cli.cluster.srun_session import Session, Streams
from gpulease.cli.render import print_stderr, stderr_status
from gpulease.cli.signals import EndedByInterrupt, Killed, Signals
from gpulease.errors import NoRoomNow, SlurmFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.wire.requests import SubmitRequest

_MOST_ATTEMPTS = 4


def run_in_foreground(
    request: SubmitRequest, words: Sequence[str], argv: Sequence[str], variables: Mapping[str, str]
) -> int:
    """Run a job with srun and return the exit code; `words` are the options of srun.

    Raises:
        SlurmFailed: Slurm did not run it.
        NoRoomNow: it did not start within the time, or all nodes refused it.
        EndedByInterrupt, Killed: a signal ended the job, or this command.
    """
    with Signals() as signals:
        terminal = request.terminal
        streams = Streams(signals, stderr_status(), on_terminal=terminal is not None)
        size = (terminal.rows, terminal.columns) if terminal else None
        give_up_at = time.monotonic() + request.wait if request.wait else None
        refusals: dict[str, str] = {}
        while True:
            without = [f"--exclude={','.join(refusals)}"] if refusals else []
            srun = Srun([*without, *words, *argv], variables, size)
            result = Session(srun, streams, give_up_at).run()
            end = JobEnd(result)
            if end.refused_by is None:
                if refusals and end.has_no_node:
                    raise _refused(refusals)
                return _finish(end, result.prolog_failed)
            refusals[end.refused_by] = end.reason or ""
            if len(refusals) == _MOST_ATTEMPTS or not streams.can_repeat:
                raise _refused(refusals)
            print_stderr(f"gpulease: {end.refused_by} refused the job: {end.reason}; trying others")


def _finish(end: JobEnd, prolog_failed: str | None) -> int:
    try:
        status, words = end.status()
    except EndedByInterrupt:
        raise
    except Killed:
        print_stderr(f"{end.label} was cancelled")
        raise
    if prolog_failed is not None and words is None:
        raise SlurmFailed(prolog_failed.removeprefix("gpulease: ") or "the task prolog failed")
    if words:
        print_stderr(words)
    return status


def _refused(refusals: Mapping[str, str]) -> NoRoomNow:
    why = "; ".join(f"{node}: {reason}" for node, reason in refusals.items())
    return NoRoomNow(
        f"cannot start the job now: its nodes refused it: {why}",
        "gpulease status shows memory that is used outside jobs; try again later, or with -d: "
        "batch jobs are queued again",
    )
