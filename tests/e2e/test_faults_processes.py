"""Thousands of zombies, and a pid that has become somebody else's."""

import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from daemon_rig import Daemon, alive, wait_for

from .asking import client, submit, when, when_in

_ZOMBIES = 2000


def test_a_job_with_thousands_of_zombies_is_shown_counted_and_ended(
    daemon: Daemon, tmp_path: Path
) -> None:
    up = tmp_path / "up"
    script = (
        "import os, pathlib, time\n"
        f"for _ in range({_ZOMBIES}):\n"
        "    if os.fork() == 0: os._exit(0)\n"
        f"pathlib.Path({str(up)!r}).touch()\n"
        "time.sleep(600)"
    )
    job = submit(daemon, "python3", "-c", script)
    wait_for("all are dead", up.exists)
    when(daemon, job, "only the living count", lambda it: it.processes == 1)
    other = submit(daemon, "sh", "-c", "exit 3")
    assert when_in(daemon, other, "ended").exit_status == 3
    client(daemon).cancel(job)
    assert when_in(daemon, job, "ended").outcome == "cancelled"


def test_a_process_that_has_a_dead_shims_pid_is_neither_ended_nor_taken_for_the_job(
    daemon: Daemon,
) -> None:
    job = submit(daemon, "sleep", "600")
    pid = when_in(daemon, job, "active").pid
    assert pid
    daemon.kill()
    shim = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for each in (shim, pid):
        os.kill(each, signal.SIGKILL)
    wait_for("both are gone", lambda: not alive([shim, pid]))
    with closing(sqlite3.connect(daemon.state / "gpulease.db")) as connection:
        (gpu,) = connection.execute("SELECT gpu FROM leases").fetchone()
    # Somebody who uses the same GPU without a lease, with a child that does.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    stranger = subprocess.Popen(
        ["sh", "-c", "sleep 600; :"], env=environment, start_new_session=True
    )
    try:
        # What the kernel does when it has come round to the same number.
        with closing(sqlite3.connect(daemon.state / "gpulease.db")) as connection:
            connection.execute(
                "UPDATE jobs SET shim_pid = ?, pid = ?", (stranger.pid, stranger.pid)
            )
            connection.commit()
        daemon.start()
        assert when_in(daemon, job, "ended").outcome == "lost"
        assert alive([stranger.pid]) == [stranger.pid]
        status = client(daemon).status()
        found = {each.pid: each.job for gpu in status.gpus for each in gpu.processes}
        assert found[stranger.pid] is None
    finally:
        os.killpg(stranger.pid, signal.SIGKILL)
        stranger.wait()
