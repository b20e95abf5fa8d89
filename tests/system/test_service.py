"""The service on a real systemd: started, hung, killed, restarted, reloaded, misconfigured."""

import signal
from pathlib import Path

import pytest

from daemon_rig import wait_for

from .conftest import CONFIG, SERVICE, Gpulease

_CAP_SYS_RESOURCE = 24
"""As in linux/capability.h."""


def test_it_is_ready_says_how_it_stands_and_will_start_at_boot(gpulease: Gpulease) -> None:
    shown = gpulease.machine.unit(SERVICE, "ActiveState", "StatusText", "UnitFileState")
    assert shown == {
        "ActiveState": "active",
        "StatusText": "2 simulated GPUs; 0 jobs running, 0 queued",
        "UnitFileState": "enabled",
    }
    gpulease.wait_until(gpulease.submit("--mem", "6G", "--", "sleep", "600"), "active")
    gpulease.submit("--gpus", "2", "--mem", "6G", "--", "true")
    gpulease.machine.wait_for_unit(SERVICE, StatusText="2 simulated GPUs; 1 job running, 1 queued")


def test_a_job_is_all_its_users_and_sees_the_files_that_they_see(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    machine.run("sh", "-c", "echo mine > ~/mine; echo shared > /tmp/shared", user="alice")
    script = (
        "id -un; id -Gn; pwd; cat mine /tmp/shared; touch out /tmp/out; readlink /proc/self/ns/mnt"
    )
    said = gpulease.run("run", "--mem", "1G", "--", "sh", "-c", script).splitlines()
    outside = machine.run("readlink", "/proc/self/ns/mnt").stdout.strip()
    assert said == ["alice", "alice lab", "/home/alice", "mine", "shared", outside]
    assert machine.run("stat", "-c", "%U", "/tmp/out", "/home/alice/out").stdout == "alice\n" * 2


def test_the_daemon_itself_can_neither_see_homes_nor_write_the_system(gpulease: Gpulease) -> None:
    inside = ("nsenter", "--mount", f"--target={gpulease.pid()}")
    run = gpulease.machine.run
    assert run(*inside, "ls", "/home/alice", check=False).returncode != 0
    assert run(*inside, "touch", "/etc/x", check=False).returncode != 0
    assert run(*inside, "touch", "/sys/fs/cgroup/x", check=False).returncode != 0
    assert run(*inside, "touch", "/var/lib/gpulease/x", check=False).returncode == 0


def test_a_job_has_no_protection_of_the_daemons_from_the_oom_killer(gpulease: Gpulease) -> None:
    if not _may_protect():
        pytest.skip("the host lacks CAP_SYS_RESOURCE, so nothing here can be protected")
    assert gpulease.machine.run("cat", f"/proc/{gpulease.pid()}/oom_score_adj").stdout == "-500\n"
    assert gpulease.run("run", "--mem", "1G", "--", "cat", "/proc/self/oom_score_adj") == "0\n"


def _may_protect() -> bool:
    (line,) = (it for it in Path("/proc/self/status").read_text().splitlines() if "CapEff" in it)
    return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def test_a_daemon_that_hangs_is_killed_by_the_watchdog_and_comes_back(gpulease: Gpulease) -> None:
    job = gpulease.submit("--mem", "1G", "--", "sleep", "600")
    started = gpulease.wait_until(job, "active")
    hung = gpulease.pid()
    gpulease.machine.run("kill", "-STOP", str(hung))
    gpulease.wait_until_back(hung)
    assert gpulease.job(job)["state"] == "active"
    assert gpulease.job(job)["pid"] == started["pid"]
    said = "\n".join(str(entry["MESSAGE"]) for entry in gpulease.machine.journal("-u", SERVICE))
    assert "Watchdog timeout" in said
    assert "Fatal Python error: Aborted" in said, "where each thread was"


def test_a_daemon_that_is_killed_comes_back_and_learns_what_it_missed(gpulease: Gpulease) -> None:
    job = gpulease.submit(
        "--mem", "1G", "--", "sh", "-c", "while ! test -e go; do sleep .1; done; exit 7"
    )
    gpulease.wait_until(job, "active")
    before = gpulease.pid()
    gpulease.machine.run("kill", "-KILL", str(before))
    gpulease.machine.run("touch", "go", user="alice")
    gpulease.wait_until_back(before)
    assert gpulease.wait_until(job, "ended")["exit_status"] == 7


def test_a_restart_touches_no_job(gpulease: Gpulease) -> None:
    attached = gpulease.machine.open(
        "gpulease", "run", "--mem", "1G", "--", "sh", "-c",
        "echo up; while ! test -e on; do sleep .1; done; echo down; exit 4", user="alice",
    )  # fmt: skip
    assert attached.stdout is not None
    assert attached.stdout.readline() == "up\n"
    before = gpulease.pid()
    gpulease.machine.run("systemctl", "restart", SERVICE)
    assert gpulease.wait_until_back(before) != before
    gpulease.machine.run("touch", "on", user="alice")
    assert attached.communicate(timeout=120)[0] == "down\n"
    assert attached.returncode == 4


def test_a_reload_takes_over_what_can_change_and_refuses_a_bad_file(gpulease: Gpulease) -> None:
    before, machine = gpulease.pid(), gpulease.machine
    gpulease.configure(CONFIG + 'margin = "7G"\n')
    machine.run("systemctl", "reload", SERVICE)
    wait_for("the margin counts", lambda: refused(gpulease))
    gpulease.configure("margin = 7G\n")
    assert machine.run("systemctl", "reload", SERVICE, check=False).returncode != 0
    assert gpulease.pid() == before
    assert gpulease.run("status")


def refused(gpulease: Gpulease) -> bool:
    done = gpulease.machine.run(
        "gpulease", "run", "--no-wait", "--mem", "4G", "--", "true", user="alice", check=False
    )
    return done.returncode in (75, 125)


def test_with_a_wrong_configuration_it_stays_down_and_the_journal_says_why(
    gpulease: Gpulease,
) -> None:
    gpulease.configure('marginn = "1G"\n')
    gpulease.machine.run("systemctl", "restart", SERVICE, check=False)
    gpulease.machine.wait_for_unit(
        SERVICE, ActiveState="failed", ExecMainStatus="78", NRestarts="0"
    )
    errors = gpulease.machine.journal("-u", SERVICE, "--priority=err", "--lines=20")
    said = [str(entry["MESSAGE"]) for entry in errors]
    assert any("'marginn'" in line for line in said), said
    assert any("hint: " in line and "margin?" in line for line in said), said


def test_the_journal_tells_an_admin_what_happened_with_levels(gpulease: Gpulease) -> None:
    entries = gpulease.machine.journal("-u", SERVICE, "--grep=ready on /run/gpulease")
    assert {entry["PRIORITY"] for entry in entries} == {"6"}
    assert {entry["SYSLOG_IDENTIFIER"] for entry in entries} == {"gpuleased"}


def test_jobs_wait_through_a_loss_of_power_and_those_that_ran_are_lost(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    ran = gpulease.submit("--gpus", "2", "--mem", "6G", "--", "sleep", "600")
    gpulease.wait_until(ran, "active")
    waiting = gpulease.submit("--mem", "6G", "--", "sh", "-c", "echo after; exit 3")
    boot = machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout
    machine.cut_power()
    machine.boot()
    assert machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout != boot
    gpulease.wait_until_back(0)
    assert gpulease.wait_until(waiting, "ended")["exit_status"] == 3
    assert gpulease.run("logs", str(waiting)) == "after\n"
    assert gpulease.job(ran)["outcome"] == "lost"


def test_jobs_that_run_at_an_orderly_reboot_end_by_its_signal(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    ran = gpulease.submit("--mem", "6G", "--", "sleep", "600")
    gpulease.wait_until(ran, "active")
    machine.reboot()
    gpulease.wait_until_back(0)
    ended = gpulease.wait_until(ran, "ended")
    assert (ended["outcome"], ended["exit_status"]) == ("signaled", 128 + signal.SIGTERM)


def test_a_job_with_requeue_runs_again_after_an_orderly_reboot(gpulease: Gpulease) -> None:
    script = "test -e ran || exec sh -c 'touch ran; sleep 600'"
    note = gpulease.machine.root / "home/alice/ran"
    note.unlink(missing_ok=True)
    ran = gpulease.submit("--requeue", "--mem", "6G", "--", "sh", "-c", script)
    wait_for("it runs", note.exists)
    gpulease.wait_until(ran, "active")
    gpulease.machine.reboot()
    gpulease.wait_until_back(0)
    again = gpulease.wait_until(ran, "ended")["retried_as"]
    assert again is not None
    ended = gpulease.wait_until(again, "ended")
    assert (ended["outcome"], ended["exit_status"]) == ("exited", 0)


def test_nothing_of_the_daemons_reaches_a_job(gpulease: Gpulease) -> None:
    script = (
        "grep -E 'SigIgn|NoNewPrivs|CapEff' /proc/self/status; env; ls -l /proc/self/fd | wc -l"
    )
    said = gpulease.run("run", "--mem", "1G", "--", "sh", "-c", script)
    assert "CapEff:\t0000000000000000" in said
    assert "NoNewPrivs:\t0" in said, "sudo and ping work"
    for secret in ("NOTIFY_SOCKET", "JOURNAL_STREAM", "INVOCATION_ID", "STATE_DIRECTORY"):
        assert secret not in said
