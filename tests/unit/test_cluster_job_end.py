"""How a job in the foreground of a cluster ended, by what Slurm and its node note."""

from pathlib import Path

import pytest

from gpulease.cli.cluster.job_end import JobEnd
from gpulease.cli.cluster.srun import Said
from gpulease.cli.cluster.srun_session import Result
from gpulease.slurm.notes import Stop, note_in, stop_in, stop_note, with_note


@pytest.fixture
def comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\ncat "$(dirname "$0")/shown"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "shown"


def started(job: int) -> Said:
    said = Said()
    said.job, said.started = job, True
    return said


@pytest.mark.parametrize(
    ("reason", "why", "status"),
    [
        ("cancelled", "n1: cancelled by root", 143),
        ("over_lease", "n1: it held 3G of cancel.py", 124),
        ("idle", "n1: it was idle", 124),
    ],
)
def test_a_stop_by_the_node_is_told_from_a_cancellation(
    comment: Path, reason: str, why: str, status: int
) -> None:
    note = with_note("project x; ", stop_note(Stop(reason, why)))
    comment.write_text(f"JobId=7 JobState=CANCELLED AdminComment={note} StdIn=/dev/null\n")
    end = JobEnd(Result(143, started(7)))
    assert end.status() == (status, f"gpulease: job 7 was stopped: {why}")


@pytest.mark.parametrize("note", ["cancel", "refused 1 time (n1): n1: cancelled by x", ""])
def test_other_comments_are_no_stop(comment: Path, note: str) -> None:
    comment.write_text(f"JobId=7 JobState=CANCELLED AdminComment={note}\n")
    end = JobEnd(Result(143, started(7)))
    assert end.status() == (143, "gpulease: job 7 was cancelled")
    assert stop_in(note_in(note)) is None
