"""A full disk at each thing that is written: nothing acknowledged is lost, and it passes."""

import os
import socket
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from daemon_rig import PATIENCE_S, Daemon, fill, wait_for
from gpulease.errors import RecordUnwritable

from .asking import G, client, submit, when_in


def fails_to_submit(daemon: Daemon) -> RecordUnwritable | None:
    try:
        submit(daemon, "true")
    except RecordUnwritable as error:
        return error
    return None


def test_full_at_submit_grant_and_launch(on_small_disk: Daemon, small_disk: Path) -> None:
    daemon = on_small_disk.start()
    blocker = submit(daemon, "sleep", "600", memory=8 * G, gpus=2)
    when_in(daemon, blocker, "active")
    accepted = [submit(daemon, "sh", "-c", f"exit {3 + n}") for n in range(3)]
    ballast = fill(small_disk)
    error = wait_for("it is said", lambda: fill(small_disk) and fails_to_submit(daemon))
    assert error.hint
    known = {job.id for job in client(daemon).jobs().jobs}
    assert known >= {blocker, *accepted}
    # Its end makes room for the others, whose grants cannot be written.
    pid = client(daemon).job(blocker).pid
    assert pid
    os.kill(pid, 9)
    wait_for("it is gone", lambda: not Path(f"/proc/{pid}").exists())
    wait_for("it is in the log", lambda: "cannot write" in daemon.log)
    assert {job.id for job in client(daemon).jobs().jobs} == known
    ballast.unlink()
    for n, job in enumerate(accepted):
        assert when_in(daemon, job, "ended").exit_status == 3 + n
    assert when_in(daemon, blocker, "ended").exit_status == 128 + 9
    assert "Traceback" not in daemon.log


def test_a_daemon_that_starts_on_a_full_disk_tries_again_and_goes_on_when_there_is_room(
    on_small_disk: Daemon, small_disk: Path
) -> None:
    daemon = on_small_disk.start()
    running = submit(daemon, "sleep", "600", memory=8 * G, gpus=2)
    when_in(daemon, running, "active")
    waiting = submit(daemon, "sh", "-c", "exit 6", memory=8 * G)
    daemon.kill()
    # The log of a database keeps room for itself; after a clean end there is none.
    with closing(sqlite3.connect(daemon.state / "gpulease.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    ballast = fill(small_disk)
    done = subprocess.run(
        daemon.command(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 75, done
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    # Under a service manager, which is told why it takes so long.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = daemon.folder / "n"
        manager.bind(str(address))
        manager.settimeout(PATIENCE_S)
        with (daemon.folder / "log").open("ab") as log:
            daemon.process = subprocess.Popen(
                daemon.command(), stdout=log, stderr=log, cwd="/",
                env={**os.environ, "NOTIFY_SOCKET": str(address)},
            )  # fmt: skip
        told = manager.recv(4096).decode()
        assert told.startswith("STATUS=")
        ballast.unlink()
        while "READY=1" not in told:
            assert "STOPPING=1" not in told, "a manager would take that for the end"
            told = manager.recv(4096).decode()
    assert client(daemon).job(running).state == "active"
    client(daemon).cancel(running)
    assert when_in(daemon, waiting, "ended").exit_status == 6


@pytest.mark.parametrize("room_kib", [0, 40])
def test_full_at_a_migration_leaves_the_old_file_and_no_half_copy(
    room_kib: int, on_small_disk: Daemon, small_disk: Path
) -> None:
    daemon = on_small_disk
    database = small_disk / "state/gpulease.db"
    released = Path(__file__).parents[1] / "data" / "0001.sql"
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(released.read_text())
    database.chmod(0o600)
    ballast = fill(small_disk)
    os.truncate(ballast, ballast.stat().st_size - room_kib * 1024)
    done = subprocess.run(
        [*daemon.command(), "--simulate", "2x8G"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 75, done
    assert "hint:" in done.stderr
    for copy in database.parent.glob("*.backup"):
        with closing(sqlite3.connect(copy)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("SELECT count(*) FROM jobs").fetchone()[0] > 0
    assert not list(database.parent.glob("*.new*"))
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("0001",)
    ballast.unlink()
    daemon.start()
    assert client(daemon).jobs(everything=True).jobs
