"""The database is locked, read-only or damaged: it is said, nothing starts empty, a way out is."""

import json
import os
import random
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from daemon_rig import PATIENCE_S, Daemon, alive, wait_for
from gpulease.errors import NoSuchJob, RecordDamaged, RecordUnwritable
from gpulease.store.database_file import back_up

from .asking import G, client, leased, submit, when_in


def pid_of(daemon: Daemon, job: int) -> int:
    line = (daemon.state / f"jobs/{job}/record").read_bytes().split(b"\n")[1]
    return int(json.loads(line)["pid"])


def damage(daemon: Daemon) -> RecordDamaged | None:
    """Return the error that a submission gets for a damaged database, or None."""
    try:
        submit(daemon, "true")
    except RecordDamaged as error:
        return error
    return None


def refused(daemon: Daemon) -> str:
    """Try to start a daemon that does not start, and return what it says."""
    done = subprocess.run(
        daemon.command(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 78, done
    assert "Traceback" not in done.stderr
    return done.stderr


def recover(daemon: Daemon, *, code: int = 0) -> str:
    command = [*daemon.command()[:3], "recover", "--state", str(daemon.state)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def into_one_file(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def garbage_in_the_middle(database: Path) -> None:
    content = bytearray(database.read_bytes())
    pages = len(content) // 4096
    for page in random.Random(7).sample(range(2, pages), pages // 6):
        content[page * 4096 : (page + 1) * 4096] = os.urandom(4096)
    database.write_bytes(content)


def broken_header(database: Path) -> None:
    with database.open("r+b") as file:
        file.write(os.urandom(100))


def test_a_damaged_database_is_replaced_by_its_copy_and_what_the_jobs_records_say(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(settings={"grace": "1s"}).start()
    gate, end, starts = tmp_path / "gate", tmp_path / "end", tmp_path / "starts"

    def until(file: Path, code: int) -> tuple[str, ...]:
        wait = f"while ! test -e {file}; do sleep 0.05; done"
        return "sh", "-c", f"echo {code} >> {starts}; {wait}; exit {code}"

    early = submit(daemon, *until(gate, 3), memory=6 * G)
    ends = submit(daemon, *until(end, 4), memory=8 * G)
    for job in (early, ends):
        when_in(daemon, job, "active")
    waits = submit(daemon, *until(gate, 5), memory=8 * G, name="waits")
    still = submit(daemon, *until(gate, 6), memory=8 * G)
    copy = wait_for("it is copied", lambda: copied(daemon))
    assert copy.stat().st_mode & 0o777 == 0o600
    # From here on, the copy knows nothing.
    end.touch()
    when_in(daemon, ends, "ended")
    when_in(daemon, waits, "active")
    late = submit(daemon, *until(gate, 7))
    quick = submit(daemon, *until(end, 8))
    when_in(daemon, late, "active")
    when_in(daemon, quick, "ended")
    lost = submit(daemon, "true", memory=8 * G)
    running = {early: 6 * G, waits: 8 * G, late: G}
    pids = {job: pid_of(daemon, job) for job in running}
    daemon.kill()
    database = daemon.state / "gpulease.db"
    into_one_file(database)
    garbage_in_the_middle(database)

    said = refused(daemon)
    assert str(database) in said
    assert f"gpuleased recover --state {daemon.state}" in said
    broken = database.read_bytes()
    said = recover(daemon)
    assert copy.name in said
    assert (daemon.state / "gpulease.db.damaged-1").read_bytes() == broken, said
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    recover(daemon)
    assert not (daemon.state / "gpulease.db.damaged-2").exists()
    assert not (daemon.state / "recovering").exists()

    daemon.start()
    asked = client(daemon)
    for job, memory in running.items():
        shown = asked.job(job)
        assert (shown.state, shown.pid) == ("active", pids[job]), said
        assert [lease.memory for lease in shown.leases] == [memory]
    assert asked.job(waits).name == "waits"
    assert (asked.job(ends).state, asked.job(ends).exit_status) == ("ended", 4)
    assert (asked.job(quick).state, asked.job(quick).exit_status) == ("ended", 8)
    assert asked.job(quick).user == asked.job(early).user
    assert asked.job(still).state == "queued"
    with pytest.raises(NoSuchJob):
        asked.job(lost)
    assert submit(daemon, "true") > lost
    gate.touch()
    for job, code in ((early, 3), (waits, 5), (still, 6), (late, 7)):
        assert when_in(daemon, job, "ended").exit_status == code
    assert sorted(starts.read_text().split()) == ["3", "4", "5", "6", "7", "8"]
    assert "Traceback" not in daemon.log


def copied(daemon: Daemon) -> Path | None:
    """Return a new copy of the database, as a daemon makes one every day."""
    # SQLite may refuse for a moment while the daemon that has just started checks the file.
    with suppress(RecordUnwritable):
        return back_up(daemon.state / "gpulease.db")
    return None


def test_a_recovery_that_is_killed_or_finds_no_space_changes_nothing(
    small_disk: Path, on_small_disk: Daemon
) -> None:
    daemon = on_small_disk.start()
    running = submit(daemon, "sleep", "600", memory=3 * G)
    pid = when_in(daemon, running, "active").pid
    wait_for("it is copied", lambda: copied(daemon))
    daemon.kill()
    database = daemon.state / "gpulease.db"
    into_one_file(database)
    broken_header(database)
    before = database.read_bytes()

    filling = small_disk / "filling"
    with suppress(OSError), filling.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    said = recover(daemon, code=75)
    assert "No space left" in said or "full" in said
    assert database.read_bytes() == before
    assert not list(daemon.state.glob("*.damaged-*"))
    filling.unlink()

    command = [*daemon.command()[:3], "recover", "--state", str(daemon.state)]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    begun = daemon.state / "recovering/gpulease.db"
    while not begun.exists() and killed.poll() is None:
        pass  # no pause: it works for some hundred milliseconds
    killed.kill()
    killed.wait()
    recover(daemon)
    daemon.start()
    shown = client(daemon).job(running)
    assert (shown.state, shown.pid) == ("active", pid)
    assert leased(daemon) == 3 * G


def test_recover_refuses_while_a_daemon_runs_and_where_there_is_none(
    daemon: Daemon, tmp_path: Path
) -> None:
    assert str(daemon.state) in recover(daemon, code=78)
    other = Daemon(tmp_path / "nothing")
    assert str(other.state) in recover(other, code=78)
    assert not other.state.exists()


def test_a_record_damaged_while_the_daemon_runs_is_told_and_running_jobs_go_on(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(settings={"grace": "1s"}).start()
    running = submit(daemon, "sleep", "600")
    when_in(daemon, running, "active")
    for _ in range(20):
        last = submit(daemon, "true")
    when_in(daemon, last, "ended")
    database = daemon.state / "gpulease.db"
    into_one_file(database)
    with database.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(database.stat().st_size - 4096))

    error = wait_for("the damage is reported", lambda: damage(daemon))
    assert error.hint
    assert "gpuleased recover" in error.hint
    assert "Traceback" not in daemon.log
    (shown,) = (job for job in client(daemon).status().jobs if job.id == running)
    assert shown.state == "active"
    pid = pid_of(daemon, running)
    daemon.kill()
    refused(daemon)
    recover(daemon)
    daemon.start()
    assert alive([pid]) == [pid]
    assert client(daemon).job(running).state == "active"


def test_a_locked_database_is_told_to_all_and_all_goes_on_when_it_is_free(
    daemon: Daemon,
) -> None:
    running = submit(daemon, "sleep", "600")
    when_in(daemon, running, "active")
    with closing(sqlite3.connect(daemon.state / "gpulease.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(8):
            # In one line: if each of them waited ten seconds, the last would never hear of it.
            with pytest.raises(RecordUnwritable, match="locked"):
                submit(daemon, "true")
        assert client(daemon).job(running).state == "active"
        assert leased(daemon) == G
        wait_for(
            "status says it", lambda: "has locked it" in (client(daemon).status().closed or "")
        )
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        run = daemon.open("run", "--mem", "1G", "--", "sh", "-c", "exit 4", **both)
        detached = daemon.open("run", "-d", "--mem", "1G", "--", "true", **both)
        left = daemon.open("run", "--mem", "1G", "--", "true", **both)
        for each in (run, detached, left):
            assert each.stderr is not None
            assert b"another program has locked it; waiting" in each.stderr.readline()
        left.send_signal(signal.SIGINT)
        left.communicate(timeout=120)
        other.execute("ROLLBACK")
        for each in (run, detached):
            each.communicate(timeout=120)
    assert [each.returncode for each in (run, detached, left)] == [4, 0, -signal.SIGINT]
    job = submit(daemon, "sh", "-c", "exit 3")
    assert when_in(daemon, job, "ended").exit_status == 3
    assert len(client(daemon).jobs(everything=True).jobs) == 4, "what was refused is not there"
    assert client(daemon).status().closed is None
    assert "has locked it" in daemon.log
    assert "Traceback" not in daemon.log


def test_a_read_only_file_system_stops_the_start_and_nothing_is_lost(
    small_disk: Path, on_small_disk: Daemon
) -> None:
    daemon = on_small_disk.start()
    blocker = submit(daemon, "sleep", "600", memory=8 * G, gpus=2)
    when_in(daemon, blocker, "active")
    waiting = submit(daemon, "sh", "-c", "exit 6", memory=8 * G)
    daemon.kill()
    os.kill(pid_of(daemon, blocker), 9)
    log = small_disk / f"state/jobs/{blocker}/record"
    wait_for("the shim has left", lambda: b'"exited"' in log.read_bytes())

    def made_read_only() -> bool:
        mount = ["mount", "-o", "remount,ro", str(small_disk)]
        return subprocess.run(mount, check=False, capture_output=True).returncode == 0

    wait_for("nobody writes there", made_read_only)
    said = refused(daemon)
    assert "Read-only file system" in said or "readonly" in said
    assert "hint:" in said
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    daemon.start()
    assert when_in(daemon, waiting, "ended").exit_status == 6


def test_a_log_cut_short_loses_what_was_last_and_no_more(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(settings={"grace": "1s"}).start()
    running = submit(daemon, "sleep", "600")
    when_in(daemon, running, "active")
    pid = pid_of(daemon, running)
    daemon.kill()
    os.truncate(daemon.state / "gpulease.db-wal", 5000)
    recover(daemon)
    daemon.start()
    assert alive([pid]) == [pid]
    assert client(daemon).job(running).state == "active"
    assert leased(daemon) == G
