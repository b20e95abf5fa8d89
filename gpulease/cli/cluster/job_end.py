"""How a job in the foreground of a cluster ended: by srun, and by what Slurm and its node note."""

import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

from gpulease.cli.cluster.srun_session import Result
from gpulease.cli.exit_codes import SIGNALED
from gpulease.cli.format import clean
from gpulease.cli.signals import EndedByInterrupt, Killed
from gpulease.errors import (
    EXIT_OWN_FAILURE,
    EXIT_TIME_LIMIT,
    NoRoomNow,
    SlurmFailed,
)
from gpulease.slurm.commands import run_slurm
from gpulease.slurm.notes import CANCELLED, note_in, stop_in
from gpulease.slurm.records import parse_record

_SETTLES_WITHIN_S = 10.0
"""Time for slurmctld to note the end of a job."""
_SETTLES_EVERY_S = 0.1
_UNSETTLED = ("COMPLETING", "RUNNING", "CONFIGURING", "STAGE_OUT")
_REFUSED = re.compile(r"refused \d+ times? \([^()]*\): ([^ :]+): (.*)", re.DOTALL)
_NO_NODE = ("node configuration is not available", "Invalid node name", "node count")
_CANCELLED = SIGNALED + signal.SIGTERM


class JobEnd:
    """The end of one attempt to run a job."""

    def __init__(self, result: Result) -> None:
        """Ask Slurm about it, unless the job simply succeeded."""
        self._result, self._said = result, result.said
        is_clear = result.status == 0 and self._said.ended
        self._record = {} if is_clear or not self._said.job else record_of(self._said.job)
        self._note = note_in(self._record.get("AdminComment", ""))
        refused = _REFUSED.match(self._note or "") if result.interrupted is None else None
        self.refused_by = refused and refused[1]
        """The node that refused the job."""
        self.reason = clean(refused[2]) if refused else None

    @property
    def has_no_node(self) -> bool:
        """Whether Slurm knows no node for the job, as when all others are excluded."""
        return not self._said.started and any(
            words in error for error in self._said.errors for words in _NO_NODE
        )

    def status(self) -> tuple[int, str | None]:
        """Return the exit code, and what to say about the end.

        Raises:
            NoRoomNow: the job did not start in time.
            SlurmFailed: Slurm did not run the job.
            EndedByInterrupt, Killed: a signal ended the job, or its wait.
        """
        if not self._said.started:
            return self._without_start()
        if self._result.interrupted is not None:
            return SIGNALED + self._result.interrupted, None
        return self._by_slurm() or self._by_itself()

    def _by_itself(self) -> tuple[int, str | None]:
        if self._result.status == SIGNALED + signal.SIGINT:
            raise EndedByInterrupt(ctrl_c_typed=self._result.ctrl_c_typed)
        if self._record.get("JobState", "").startswith("CANCELLED"):
            return _CANCELLED, f"{self.label} was cancelled"
        if self._said.ended or self._record.get("JobState") == "COMPLETED":
            return self._result.status, None
        return EXIT_OWN_FAILURE, f"{self.label}: {self._errors or 'lost; how it ended is unknown'}"

    def _without_start(self) -> tuple[int, str | None]:
        if (signum := self._result.interrupted) is not None:
            raise Killed(signum)
        if self._result.gave_up:
            raise NoRoomNow(f"gave up waiting: job {self._said.job} did not start in time")
        if self._said.busy:
            raise NoRoomNow(
                "cannot start the job now: no GPU of the cluster has room",
                "gpulease status shows the GPUs; without --no-wait, the job is queued",
            )
        if self._record.get("JobState", "").startswith("CANCELLED") and not self._errors:
            return _CANCELLED, f"{self.label} was cancelled"
        said = self._errors or clean(self._said.complaint)
        why = said or f"srun ended with exit code {self._result.status}"
        raise SlurmFailed(f"cannot run the job: {why}", _hint(why))

    def _by_slurm(self) -> tuple[int, str] | None:
        """Return an end by a limit or a failure of a node, if it was one."""
        if self._record.get("JobState") == "TIMEOUT":
            return EXIT_TIME_LIMIT, f"{self.label} reached its time limit"
        if self._record.get("JobState") == "NODE_FAIL":
            return EXIT_OWN_FAILURE, f"{self.label} was lost: its node failed"
        if (stop := stop_in(self._note)) is not None:
            status = _CANCELLED if stop.reason == CANCELLED else EXIT_TIME_LIMIT
            return status, f"{self.label} was stopped: {clean(stop.text)}"
        return None

    @property
    def label(self) -> str:
        """The beginning of a message about the job."""
        return "gpulease: the job" if self._said.job is None else f"gpulease: job {self._said.job}"

    @property
    def _errors(self) -> str:
        return clean("; ".join(dict.fromkeys(self._said.errors)))


def record_of(job: int) -> Mapping[str, str]:
    """Return what Slurm knows of a job, once it has noted the end; nothing if it is away."""
    deadline = time.monotonic() + _SETTLES_WITHIN_S
    while True:
        record: Mapping[str, str] = {}
        with suppress(SlurmFailed):
            shown = run_slurm(["scontrol", "show", "job", "--oneliner", str(job)])
            record = parse_record(shown.partition("\n")[0])
        if record.get("JobState") not in _UNSETTLED or time.monotonic() > deadline:
            return record
        time.sleep(_SETTLES_EVERY_S)


def _hint(why: str) -> str | None:
    if "contact slurm controller" in why or "Socket timed out" in why:
        return "slurmctld does not answer; check it with: scontrol ping"
    return None
