"""Leases that nobody uses, while others wait: told, counted down, taken back; and kept."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from daemon_rig import Daemon, wait_for
from goldens import mentions
from nvml_stand_in import Card, StandIn

IDLE = {"grace": "2s", "idle": "release", "idle_after": "2s", "idle_grace": "2s"}
BUSY = "import time\nwhile True: sum(range(1_000_000)); time.sleep(0.1)"
G = 1024**3


def notices(daemon: Daemon, job: int) -> list[str]:
    return [each["detail"] for each in daemon.job(job)["events"] if each["kind"] == "notice"]


def test_who_does_nothing_goes_when_somebody_waits_and_who_computes_stays(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(simulate="2x1G", settings=IDLE).start()
    sleeper = daemon.submit("--mem", "900M", "--", "sleep", "600")
    worker = daemon.submit("--mem", "900M", "--", sys.executable, "-c", BUSY)
    daemon.wait_until(worker, "active")
    wait_for("it is idle", lambda: daemon.job(sleeper)["idle_since_at"])
    assert notices(daemon, sleeper) == [], "nobody waits"

    waiting = daemon.submit("--mem", "900M", "--", "true")
    ended = daemon.wait_until(sleeper, "ended")

    assert (ended["outcome"], ended["exit_status"]) == ("idle", 124)
    assert "GPU" in ended["reason"]
    assert "gpulease keep" in ended["hint"]
    (told,) = notices(daemon, sleeper)
    assert mentions(told, "2s", "gpulease keep 1")
    assert f"gpulease: {told}\n" in (daemon.state / f"jobs/{sleeper}/stderr").read_text()
    assert daemon.wait_until(waiting, "ended")["exit_status"] == 0
    assert daemon.job(worker)["state"] == "active"
    assert notices(daemon, worker) == []


def test_a_kept_lease_stays_and_its_time_counts_anew_afterwards(
    make_daemon: Callable[..., Daemon],
) -> None:
    settings = IDLE | {"idle_grace": "600s", "sample_every": "3s"}
    daemon = make_daemon(simulate="1x1G", settings=settings).start()
    sleeper = daemon.submit("--mem", "900M", "--", "sleep", "600")
    daemon.submit("--mem", "900M", "--", "true")
    wait_for("the notice is there", lambda: notices(daemon, sleeper))
    page = daemon.run("show", str(sleeper)).stdout
    assert mentions(page, "9m", "gpulease keep 1")

    kept = daemon.run("keep", str(sleeper), "--for", "2h")
    assert "job 1 " in kept.stdout
    # At once, and not from the next look on.
    assert daemon.job(sleeper)["idle_since_at"] is None
    daemon.kill()
    daemon.start()
    assert daemon.job(sleeper)["kept_until_at"]

    assert daemon.run("keep", str(sleeper), "--for", "1s").returncode == 0
    wait_for("it is told again", lambda: len(notices(daemon, sleeper)) == 2)


def test_what_cannot_be_kept_is_said(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings=IDLE).start()
    job = daemon.submit("--array", "0", "--", "true")
    daemon.wait_until(job, "ended")
    late = daemon.run("keep", str(job), check=False)
    assert late.returncode == 125
    assert "job 1_0:" in late.stderr
    long = daemon.run("keep", str(job), "--for", "2d", check=False)
    assert long.returncode == 2
    assert "cannot use --for 2d: it is 1s to 1d" in long.stderr
    assert "99" in daemon.run("keep", "99", check=False).stderr


def test_a_hold_that_keeps_memory_is_told_and_one_that_has_none_is_taken_back(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    stand_in = StandIn(tmp_path, gpus=[Card(total=8 * G)])
    daemon = make_daemon(simulate=None, environment=stand_in.environment(), settings=IDLE).start()
    with subprocess.Popen(["sleep", "600"]) as holder:
        try:
            daemon.run("hold", "--mem", "6G", "--pid", str(holder.pid))
            stand_in.change(0, used=2 * G, processes=[(holder.pid, 2 * G)])
            wait_for("it is seen", lambda: daemon.job(1)["leases"][0]["used"] == 2 * G)
            waiting = daemon.submit("--mem", "6G", "--", "true")
            wait_for("the notice is there", lambda: notices(daemon, 1))
            assert "gpulease cancel 1" in notices(daemon, 1)[0]
            assert daemon.job(1)["state"] == "active"

            stand_in.change(0, used=0, processes=[])
            assert daemon.wait_until(1, "ended")["outcome"] == "idle"
            daemon.wait_until(waiting, "ended")
            os.kill(holder.pid, 0)
        finally:
            holder.kill()
