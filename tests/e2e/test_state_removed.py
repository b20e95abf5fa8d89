"""The state directory is emptied or moved away under the daemon: what runs goes on, on record."""

import shutil
import time
from pathlib import Path

import psutil

from daemon_rig import Daemon, alive, wait_for

from .asking import G, client, leased, submit, when, when_in

_BACKGROUND = (
    "(trap 'echo >>{0}/terminated; exit' TERM; while :; do sleep 0.05; done) & echo $! >{0}/pid;"
)


def empty(state: Path) -> None:
    """Remove all that is in the state directory, as `rm -rf STATE/*` does."""
    for each in state.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()


def running(daemon: Daemon, *argv: str) -> tuple[int, int]:
    """Return a running job and its pid, once the daemon is connected to its shim."""
    job = submit(daemon, *(argv or ("sleep", "600")), memory=2 * G)
    pid = when_in(daemon, job, "active").pid
    assert pid
    shim = psutil.Process(pid).parent()
    assert shim is not None
    # The shim has a socket that listens, and one for each connection.
    wait_for("the daemon is connected", lambda: len(shim.net_connections("unix")) > 1)
    return job, pid


def test_jobs_start_and_go_on_after_the_state_directory_was_emptied(
    short_grace: Daemon, tmp_path: Path
) -> None:
    daemon = short_grace
    kept, pid = running(daemon)
    gate = tmp_path / "gate"
    ends, _ = running(daemon, "sh", "-c", f"while ! test -e {gate}; do sleep 0.05; done")

    empty(daemon.state)

    wait_for("jobs/ is there again", (daemon.state / "jobs").exists)
    assert (daemon.state / "jobs").stat().st_mode & 0o777 == 0o711
    assert when_in(daemon, submit(daemon, "sh", "-c", "exit 4"), "ended").exit_status == 4
    gate.touch()
    assert when_in(daemon, ends, "ended").outcome == "exited"
    assert client(daemon).job(kept).state == "active"
    assert leased(daemon) == 2 * G
    assert alive([pid]) == [pid]
    assert daemon.log.count(str(daemon.state / "jobs")) == 1
    assert "Traceback" not in daemon.log


def test_a_restart_finds_the_jobs_whose_directories_were_removed(
    short_grace: Daemon, tmp_path: Path
) -> None:
    daemon = short_grace
    job, pid = running(daemon)
    gate = tmp_path / "gate"
    ends, _ = running(daemon, "sh", "-c", f"while ! test -e {gate}; do sleep 0.05; done")
    empty(daemon.state)
    wait_for("the database is put back", (daemon.state / "gpulease.db").exists)
    wait_for("jobs/ is there again", (daemon.state / "jobs").exists)
    daemon.kill()

    daemon.start()

    wait_for("it is noticed", lambda: "missing" in daemon.log)
    gate.touch()
    assert when_in(daemon, ends, "ended").outcome == "lost"
    assert client(daemon).job(job).state == "active"
    assert leased(daemon) == 2 * G
    assert alive([pid]) == [pid]
    assert daemon.log.count("missing") == 1
    client(daemon).cancel(job)
    assert when_in(daemon, job, "ended").outcome == "cancelled"
    assert not alive([pid])
    assert "Traceback" not in daemon.log


def test_a_job_without_its_directory_is_cancelled_with_all_its_processes(
    short_grace: Daemon, tmp_path: Path
) -> None:
    daemon = short_grace
    script = (
        "env -i setsid sh -c 'trap \"\" TERM; echo $$ >%s; while :; do sleep 0.05; done' & wait"
        % (tmp_path / "stubborn")
    )
    job, pid = running(daemon, "sh", "-c", script)
    stubborn = int(wait_for("it is up", lambda: _text(tmp_path / "stubborn")))
    shutil.rmtree(daemon.state / "jobs")

    client(daemon).cancel(job)

    assert when_in(daemon, job, "ended").outcome == "cancelled"
    assert not alive([pid, stubborn])
    assert leased(daemon) == 0


def test_nothing_of_a_job_is_ended_while_the_state_directory_is_away(
    short_grace: Daemon, tmp_path: Path
) -> None:
    daemon = short_grace
    gate = tmp_path / "gate"
    wait = f"while ! test -e {gate}; do sleep 0.05; done;"
    job, main = running(daemon, "sh", "-c", f"{_BACKGROUND.format(tmp_path)} {wait} exit 3")
    background = int(wait_for("it is up", lambda: _text(tmp_path / "pid")))
    kept = daemon.state.rename(daemon.folder / "elsewhere")

    gate.touch()
    wait_for("the main process is gone", lambda: not alive([main]))
    wait_for("it is noticed", lambda: "cannot write" in daemon.log)
    _let_pass(daemon)
    kept.rename(daemon.state)

    shown = when(daemon, job, "the news is heard", lambda it: it.main_exited_at is not None)
    assert shown.state == "active"
    assert alive([background]) == [background]
    assert not (tmp_path / "terminated").exists()
    assert "Traceback" not in daemon.log


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _let_pass(daemon: Daemon) -> None:
    """Let the daemon look again at what it complains of: every 2 or 5 seconds."""
    until = time.monotonic() + 7
    wait_for("some looks", lambda: time.monotonic() > until)
