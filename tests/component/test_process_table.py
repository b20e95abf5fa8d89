"""Whose process is whose."""

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpulease.domain.gpu import JobId
from gpulease.host.process_finder import Finder
from gpulease.host.processes import MARKER, ProcessTable
from process_rig import (
    PATH,
    ephemeral_user,
    is_running,
    kill,
    output,
    shell,
    start,
    wait_until,
)

SLEEP = ["/bin/sleep", "1000"]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, env={**PATH, MARKER: "inst/9"}) as process:
        wait_until(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        yield process
        process.kill()


def finder() -> Finder:
    return Finder(ProcessTable(), "inst")


def test_a_process_is_identified(stranger: subprocess.Popen[bytes]) -> None:
    found = finder().identify(stranger.pid)

    assert found is not None
    assert (found.user, found.name) == (pwd.getpwuid(os.getuid()).pw_name, "sleep")
    assert found.command == " ".join(SLEEP)
    assert abs(found.started_at - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_kernel_thread_has_no_command() -> None:
    found = finder().identify(2)
    if found is None:
        pytest.skip("no kernel threads are seen in this container")

    assert found.command is None


def test_descendants_of_a_shim_belong_to_its_job(directory: Path) -> None:
    started = start(shell(directory, "(setsid sleep 1000 & echo $!); sleep 1000"))
    below = int(wait_until(lambda: output(directory)))
    roots = {started.shim_pid: JobId(17)}

    found = ProcessTable().jobs_of([started.pid, below, os.getpid(), 1], roots, "inst/")

    assert found == {started.pid: 17, below: 17}


def test_a_marker_tells_the_job_where_ancestry_does_not(
    stranger: subprocess.Popen[bytes],
) -> None:
    table = ProcessTable()

    assert table.jobs_of([stranger.pid], {}, "inst/") == {stranger.pid: 9}
    assert table.jobs_of([stranger.pid], {}, "other/") == {}
    assert table.jobs_of([stranger.pid], {}, "inst/", {JobId(9): os.getuid()}) == {stranger.pid: 9}


def test_a_marker_on_someone_elses_process_counts_for_nothing(
    stranger: subprocess.Popen[bytes],
) -> None:
    table = ProcessTable()

    assert table.jobs_of([stranger.pid], {}, "inst/", {JobId(9): os.getuid() + 1}) == {}
    assert table.jobs_of([stranger.pid], {}, "inst/", {JobId(8): os.getuid()}) == {}


@pytest.mark.parametrize("marker", ["inst/", "inst/x", "inst/-1", "inst/\u0661"])
def test_a_marker_that_is_no_job_counts_for_nothing(marker: str) -> None:
    with subprocess.Popen(SLEEP, env={MARKER: marker}) as process:
        wait_until(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        assert ProcessTable().jobs_of([process.pid], {}, "inst/") == {}
        process.kill()


def test_a_process_that_became_another_is_looked_at_anew() -> None:
    table = ProcessTable()
    program = (
        "import os, sys; sys.stdin.read(1); os.execve('/bin/sleep', ['sleep', '1000'], {%r: %r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program % (MARKER, "inst/9")], stdin=subprocess.PIPE
    ) as process:
        assert table.jobs_of([process.pid], {}, "inst/") == {}
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        wait_until(lambda: table.jobs_of([process.pid], {}, "inst/") == {process.pid: 9})
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_setuid_disguise_does_not_help(directory: Path) -> None:
    with (
        ephemeral_user() as user,
        subprocess.Popen(SLEEP, env={MARKER: "inst/9"}, user=user.pw_uid) as process,
    ):
        table = ProcessTable()
        wait_until(lambda: is_running(process.pid) and table.jobs_of([process.pid], {}, "inst/"))
        assert table.jobs_of([process.pid], {}, "inst/", {JobId(9): 0}) == {}
        assert table.jobs_of([process.pid], {}, "inst/", {JobId(9): user.pw_uid}) != {}
        found = finder().identify(process.pid)
        assert found is not None and found.user == user.pw_name
        kill(process.pid)
