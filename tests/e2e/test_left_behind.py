"""A job whose main process has ended and left others behind still holds its lease, and says so."""

from pathlib import Path

from daemon_rig import Daemon
from e2e.asking import client, leased, submit, when, when_in


def test_what_the_main_process_left_behind_keeps_the_lease_and_is_counted(
    shared: Daemon, tmp_path: Path
) -> None:
    daemon, gate = shared, tmp_path / "gate"
    left = f"while ! test -e {gate}; do sleep 0.05; done"
    job = submit(daemon, "bash", "-c", f"({left}) & ({left}) & exit 3")
    shown = when(daemon, job, "its main process has ended", lambda it: it.main_exited_at)
    assert shown.state == "active"
    assert shown.reason is not None
    assert "exit status 3" in shown.reason
    assert shown.exit_status is None, "it has not ended"
    assert shown.processes is not None
    assert shown.processes >= 2
    assert leased(daemon) > 0
    daemon.kill()
    daemon.start()
    again = client(daemon).job(job)
    assert (again.main_exited_at, again.reason) == (shown.main_exited_at, shown.reason)
    gate.touch()
    ended = when_in(daemon, job, "ended")
    assert (ended.outcome, ended.exit_status) == ("exited", 3)
    assert [event.kind for event in ended.events].count("main_exited") == 1
