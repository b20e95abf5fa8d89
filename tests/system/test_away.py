"""While the machine's daemon is away, its users wait for it, and start none of their own."""

from .conftest import SERVICE, Gpulease

_ECHO = ("gpulease", "run", "--mem", "1G", "--", "echo", "ran")


def test_a_run_that_comes_during_a_restart_waits_for_it(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    machine.run("systemctl", "stop", SERVICE)
    waiting = machine.open(*_ECHO, user="alice")
    assert waiting.stderr is not None
    assert "20s" in waiting.stderr.readline()
    machine.run("systemctl", "start", SERVICE)
    assert waiting.communicate(timeout=120) == ("ran\n", "")
    assert waiting.returncode == 0


def test_one_that_stays_away_is_told_of_and_how_to_have_one_of_ones_own(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    machine.run("systemctl", "stop", SERVICE)
    refused = machine.run(*_ECHO, user="alice", check=False)
    assert refused.returncode == 125
    assert "systemctl status gpuleased" in refused.stderr
    assert machine.run("pgrep", "-u", "alice", check=False).stdout == "", "nothing was started"

    start = refused.stderr.partition("a second time: ")[2].strip()
    until_ready = "until gpulease status > /dev/null 2>&1; do sleep .1; done"
    script = f"{start}\n{until_ready}; {' '.join(_ECHO)}; kill $!; wait"
    simulated = {"GPULEASE_SIMULATE": "1x2G"}
    said = machine.run("sh", "-c", script, user="alice", environment=simulated).stdout
    assert said == "ran\n"


def test_a_machine_has_a_daemon_before_that_is_started_for_the_first_time(
    gpulease: Gpulease,
) -> None:
    machine = gpulease.machine
    machine.run("systemctl", "disable", SERVICE)
    try:
        machine.reboot()
        shown = machine.run("stat", "--format=%A %U %G", "/run/gpulease").stdout
    finally:
        machine.run("systemctl", "enable", "--now", SERVICE)
    assert shown == "drwxr-xr-x root root\n"
