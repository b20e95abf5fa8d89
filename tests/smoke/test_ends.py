"""How jobs end, and that their memory is free when they are gone and not before."""

import sys
from datetime import UTC, datetime
from pathlib import Path

from daemon_rig import Daemon, alive, wait_for
from goldens import mentions

G = 1024**3
HUNGRY = "held = b'x' * (400 << 20); print(len(held), flush=True); import time; time.sleep(600)"


def test_a_stubborn_job_keeps_its_memory_until_it_is_killed_with_all_its_processes(
    daemon: Daemon, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    deaf = "trap '' TERM; echo $$ >>{0}; while :; do sleep 0.1; done"
    script = f'setsid sh -c "{deaf.format(pids)}" & {deaf.format(pids)}'
    job = daemon.submit("--mem", "6G", "--gpus", "2", "--", "sh", "-c", script)
    wait_for("both are up", lambda: pids.exists() and len(pids.read_text().split()) == 2)
    waiting = daemon.submit("--mem", "6G", "--", "true")

    daemon.cancel(job)
    assert daemon.job(job)["state"] == "releasing"
    assert daemon.job(waiting)["state"] == "queued", "it still holds its memory"

    ended, started = daemon.wait_until(job, "ended"), daemon.wait_until(waiting, "ended")
    assert (ended["outcome"], ended["exit_status"]) == ("cancelled", 137)
    assert started["granted_at"] >= ended["ended_at"]
    assert alive([int(pid) for pid in pids.read_text().split()]) == []


def test_a_job_over_its_lease_is_told_and_stopped_and_its_neighbour_goes_on(
    daemon: Daemon,
) -> None:
    neighbour = daemon.submit("--mem", "1G", "--", "sleep", "600")
    job = daemon.submit("--mem", "300M", "--", sys.executable, "-c", HUNGRY)

    ended = daemon.wait_until(job, "ended")
    assert (ended["outcome"], ended["exit_status"]) == ("over_lease", 124)
    assert "--mem" in ended["hint"]
    kinds = [each["kind"] for each in ended["events"]]
    assert kinds.index("notice") < kinds.index("revoke")
    assert mentions(daemon.run("logs", str(job)).stderr, "gpulease: ", f"job {job} ", "300M")
    assert daemon.job(neighbour)["state"] == "active"


def test_a_job_that_ran_out_of_memory_is_tried_again_with_more(daemon: Daemon) -> None:
    says_so = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    script = f"test $GPULEASE_MEMORY -ge {3 * G} && exit 0; echo '{says_so}' >&2; exit 1"
    first = daemon.submit("--mem", "2G", "--retry-oom", "1.5x", "--", "sh", "-c", script)
    again = daemon.wait_until(first, "ended")["retried_as"]
    ended = daemon.wait_until(again, "ended")
    assert (ended["claim"]["memory"], ended["exit_status"]) == (3 * G, 0)


def test_a_new_time_limit_counts_at_once(daemon: Daemon) -> None:
    job = daemon.submit("--mem", "1G", "--time", "1h", "--", "sleep", "600")
    daemon.wait_until(job, "active")
    assert f"job {job} " in daemon.run("extend", str(job), "+1h").stdout
    assert daemon.job(job)["claim"]["time_limit"] == 7200
    started = datetime.fromisoformat(daemon.job(job)["started_at"])
    daemon.client.extend(job, (datetime.now(UTC) - started).total_seconds() + 2 - 7200)
    assert daemon.wait_until(job, "ended")["outcome"] == "time_limit"
