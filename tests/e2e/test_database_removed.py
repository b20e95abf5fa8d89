"""The database is removed or replaced: no daemon starts without it, and nothing stored is lost."""

import os
import sqlite3
from contextlib import closing

import pytest

from daemon_rig import Daemon, alive, wait_for
from gpulease.errors import RecordUnwritable

from .asking import G, client, hold, leased, submit, when_in
from .test_faults_database import copied, damage, recover, refused


def remove(daemon: Daemon) -> None:
    for file in daemon.state.glob("gpulease.db*"):
        file.unlink()


def running(daemon: Daemon, memory: int = 3 * G) -> tuple[int, int]:
    """Return a job that runs, and its pid."""
    job = submit(daemon, "sleep", "600", memory=memory)
    pid = when_in(daemon, job, "active").pid
    assert pid
    return job, pid


def test_no_daemon_starts_empty_beside_jobs_that_run(short_grace: Daemon) -> None:
    daemon = short_grace
    job, pid = running(daemon)
    lease = hold(daemon, os.getpid())
    daemon.kill()
    remove(daemon)
    said = refused(daemon)
    assert f"job {job}" in said
    assert f"gpuleased recover --state {daemon.state}" in said
    assert not (daemon.state / "gpulease.db").exists()
    assert alive([pid]) == [pid]
    assert f"job {job} of " in recover(daemon)
    daemon.start()
    assert client(daemon).job(job).state == "active"
    assert leased(daemon) == 3 * G
    assert submit(daemon, "true") > lease, "a lease has no directory, and its id is not used again"


def test_no_daemon_starts_with_an_older_copy_that_does_not_know_what_runs(
    short_grace: Daemon,
) -> None:
    daemon = short_grace
    copy = wait_for("it is copied", lambda: copied(daemon))
    job, _ = running(daemon)
    daemon.kill()
    for end in ("-wal", "-shm"):
        (daemon.state / f"gpulease.db{end}").unlink(missing_ok=True)
    copy.replace(daemon.state / "gpulease.db")
    assert f"job {job}" in refused(daemon)
    recover(daemon)
    daemon.start()
    assert client(daemon).job(job).state == "active"


def test_a_new_database_gives_no_id_that_a_removed_one_gave(short_grace: Daemon) -> None:
    daemon = short_grace
    when_in(daemon, submit(daemon, "true"), "ended")
    lease = hold(daemon, os.getpid())
    daemon.kill()
    remove(daemon)
    daemon.start()
    assert submit(daemon, "true") > lease


def test_a_database_removed_under_the_daemon_is_put_back_with_all_that_was_acknowledged(
    short_grace: Daemon,
) -> None:
    daemon = short_grace
    job, pid = running(daemon)
    remove(daemon)
    late = submit(daemon, "sh", "-c", "exit 4")
    # Acknowledged, and so on disk, at the path.
    daemon.kill()
    with closing(sqlite3.connect(daemon.state / "gpulease.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    daemon.start()
    assert client(daemon).job(job).pid == pid
    assert when_in(daemon, late, "ended").exit_status == 4
    assert str(daemon.state / "gpulease.db") in daemon.log
    assert "Traceback" not in daemon.log


def test_a_database_removed_while_nobody_asks_is_put_back_within_seconds(
    short_grace: Daemon,
) -> None:
    daemon = short_grace
    job, _ = running(daemon)
    for _ in range(3):
        remove(daemon)
        wait_for("it is back", (daemon.state / "gpulease.db").exists)
        assert when_in(daemon, submit(daemon, "true"), "ended").exit_status == 0
    daemon.kill()
    daemon.start()
    assert client(daemon).job(job).state == "active"
    assert len(client(daemon).jobs(everything=True).jobs) == 4


def test_a_log_removed_under_the_daemon_costs_nothing_that_was_acknowledged(
    short_grace: Daemon,
) -> None:
    daemon = short_grace
    early, _ = running(daemon)
    (daemon.state / "gpulease.db-wal").unlink()
    late = [submit(daemon, "sh", "-c", "exit 4") for _ in range(3)]
    daemon.kill()
    daemon.start()
    assert client(daemon).job(early).state == "active"
    for job in late:
        assert when_in(daemon, job, "ended").exit_status == 4
    assert "gpulease.db-wal" in daemon.log or str(daemon.state / "gpulease.db") in daemon.log
    assert "Traceback" not in daemon.log


def test_where_it_cannot_be_put_back_nothing_is_acknowledged(short_grace: Daemon) -> None:
    daemon = short_grace
    job, _ = running(daemon)
    kept = daemon.state.rename(daemon.folder / "elsewhere")
    with pytest.raises(RecordUnwritable) as caught:
        submit(daemon, "true")
    assert caught.value.hint
    assert client(daemon).job(job).state == "active"
    kept.rename(daemon.state)
    assert when_in(daemon, submit(daemon, "true"), "ended").exit_status == 0


def test_another_file_in_its_place_is_left_alone_and_nothing_is_acknowledged(
    short_grace: Daemon,
) -> None:
    daemon = short_grace
    database = daemon.state / "gpulease.db"
    copy = wait_for("it is copied", lambda: copied(daemon))
    job, pid = running(daemon)
    former = database.rename(daemon.folder / "former")
    other = copy.read_bytes()
    os.link(copy, database)

    error = wait_for("it is refused", lambda: damage(daemon))
    assert error.message
    assert error.hint
    assert database.read_bytes() == other
    (shown,) = client(daemon).status().jobs
    assert (shown.id, shown.state) == (job, "active")
    with closing(sqlite3.connect(daemon.state / "gpulease.db.removed.backup")) as connection:
        assert connection.execute("SELECT state FROM jobs WHERE id = ?", (job,)).fetchone()
    assert (daemon.state / "gpulease.db-wal").stat().st_size == 0, "it is no log of the other file"
    # Put back by hand, it is used again.
    database.unlink()
    former.rename(database)
    ended = submit(daemon, "true")
    assert when_in(daemon, ended, "ended").exit_status == 0
    assert alive([pid]) == [pid]
    assert "Traceback" not in daemon.log
