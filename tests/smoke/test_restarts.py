"""The daemon is killed and comes back: nothing that ran ends, nothing that waited is lost."""

import subprocess
import sys
from pathlib import Path

from daemon_rig import Daemon, alive, wait_for


def test_running_waiting_and_finished_jobs_survive_kill_9_of_the_daemon(
    daemon: Daemon, tmp_path: Path
) -> None:
    gate, ran = tmp_path / "gate", tmp_path / "ran"
    wait, wait_b = (f"while ! test -e {it}; do sleep 0.05; done" for it in (gate, f"{gate}.b"))
    running = daemon.submit("--mem", "6G", "--", "sh", "-c", f"echo a >>{ran}; {wait}; exit 5")
    finishing = daemon.submit("--mem", "6G", "--", "sh", "-c", f"echo b >>{ran}; {wait_b}; exit 6")
    waiting = daemon.submit("--mem", "6G", "--", "sh", "-c", f"echo c >>{ran}; exit 7")
    pid = daemon.wait_until(running, "active")["pid"]
    daemon.wait_until(finishing, "active")
    daemon.kill()
    Path(f"{gate}.b").touch()
    record = daemon.state / f"jobs/{finishing}/record"
    wait_for("the second has ended", lambda: '"event":"exited"' in record.read_text())
    assert alive([pid]) == [pid]
    daemon.start()
    assert daemon.wait_until(finishing, "ended")["exit_status"] == 6
    assert daemon.job(running)["state"] == "active"
    assert daemon.job(running)["pid"] == pid
    assert daemon.wait_until(waiting, "ended")["exit_status"] == 7
    gate.touch()
    assert daemon.wait_until(running, "ended")["exit_status"] == 5
    assert sorted(ran.read_text().split()) == ["a", "b", "c"], "no job ran twice"


def test_an_attached_run_sees_nothing_of_a_daemon_that_is_killed(
    daemon: Daemon, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = f"echo up; while ! test -e {gate}; do sleep 0.05; done; echo down; exit 4"
    run = daemon.open("run", "--mem", "1G", "--", "sh", "-c", script, stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    (job,) = daemon.status()["jobs"]
    daemon.kill()
    gate.touch()
    assert run.communicate(timeout=120)[0] == b"down\n"
    assert run.returncode == 4
    daemon.start()
    assert daemon.wait_until(job["id"], "ended")["exit_status"] == 4


def test_followed_logs_continue_where_they_were_when_the_daemon_was_killed(
    daemon: Daemon, tmp_path: Path
) -> None:
    gates = [tmp_path / name for name in "abc"]
    waits = [f"until test -e {each}; do sleep 0.05; done" for each in gates]
    script = f"seq 9; {waits[0]}; seq 10 12; {waits[1]}; seq 13 15; {waits[2]}; echo up >&2; exit 4"
    job = daemon.submit("--mem", "1G", "--", "sh", "-c", script)
    daemon.wait_until(job, "active")
    wait_for("it writes", lambda: (daemon.state / f"jobs/{job}/stdout").read_text().endswith("9\n"))
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    following = daemon.open("logs", "-f", "--tail", "3", str(job), **both)
    assert following.stdout is not None
    read = [following.stdout.readline() for _ in range(3)]
    gates[0].touch()
    read += [following.stdout.readline() for _ in range(3)]
    daemon.kill()
    gates[1].touch()
    kept = daemon.state / f"jobs/{job}/stdout"
    wait_for("it writes without a daemon", lambda: kept.read_text().endswith("15\n"))
    daemon.start()
    read += [following.stdout.readline() for _ in range(3)]
    assert read == [b"%d\n" % each for each in range(7, 16)]
    gates[2].touch()
    rest, said = following.communicate(timeout=120)
    assert (rest, following.returncode) == (b"", 0)
    assert said.splitlines()[0].startswith(b"gpulease: lost connection to the daemon")
    assert said.splitlines()[1:] == [b"up"]


def test_a_run_that_waits_finds_the_daemon_again(daemon: Daemon) -> None:
    holder = daemon.submit("--exclusive", "--gpus", "2", "--", "sleep", "600")
    daemon.wait_until(holder, "active")
    run = daemon.open(
        "run", "--mem", "1G", "--", "sh", "-c", "echo ran; exit 3",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for("it waits", lambda: len(daemon.status()["jobs"]) == 2)
    daemon.kill()
    daemon.start()
    daemon.cancel(holder)
    out, _ = run.communicate(timeout=120)
    assert (out, run.returncode) == (b"ran\n", 3)


def test_a_second_daemon_on_the_same_state_is_refused(daemon: Daemon) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "gpulease.daemon", "--simulate", "8G", "--state", str(daemon.state),
         "--socket", str(daemon.folder / "other")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert second.returncode == 78
    assert str(daemon.state) in second.stderr
    assert daemon.status()["gpus"]


def test_a_drained_gpu_takes_no_lease_over_a_restart_until_it_is_resumed(daemon: Daemon) -> None:
    daemon.run("drain", "0", "--why", "fan")
    daemon.kill()
    daemon.start()
    drained, other = daemon.status()["gpus"]
    assert (drained["state"], drained["memory"]["headroom"]) == ("drained", 0)
    job = daemon.submit("--mem", "1G", "--", "sleep", "600")
    assert daemon.wait_until(job, "active")["leases"][0]["gpu"] == other["uuid"]
    daemon.run("resume", "0")
    assert [gpu["state"] for gpu in daemon.status()["gpus"]] == ["available", "available"]
