"""Lease, launch, show: what a user types, against a real daemon on simulated GPUs."""

import json
import re
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions

G = 1024**3


def test_a_job_finds_its_lease_in_its_environment(daemon: Daemon) -> None:
    script = (
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['GPULEASE_MEMORY'],"
        " os.environ['CUDA_DEVICE_ORDER'])"
    )
    out = daemon.run("run", "--mem", "3G", "--", "python3", "-c", script).stdout.split()
    assert out[0] in {gpu["uuid"] for gpu in daemon.status()["gpus"]}
    assert out[1:] == ["3221225472", "PCI_BUS_ID"]


def test_both_streams_arrive_apart_and_the_exit_status_is_the_jobs(daemon: Daemon) -> None:
    done = daemon.run(
        "run", "--mem", "3G", "--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False
    )
    assert done.returncode == 7
    assert done.stdout == "out\n"
    assert done.stderr == "err\n"


def test_two_run_on_different_gpus_and_the_third_says_for_which_lease_it_waits(
    daemon: Daemon,
) -> None:
    first, second, third = (daemon.submit("--mem", "6G", "--", "sleep", "60") for _ in range(3))
    gpus = [daemon.wait_until(job, "active")["leases"][0]["gpu"] for job in (first, second)]
    assert len(set(gpus)) == 2
    waiting = daemon.job(third)
    assert waiting["state"] == "queued"
    assert waiting["position"] == 1
    assert waiting["waits_for"] == [first, second]
    assert waiting["reason"] == "needs 6G, and at most 2G is free on a GPU now"
    assert all("2G" in refusal["why"] for refusal in waiting["refusals"])
    assert len(waiting["refusals"]) == 2
    daemon.cancel(second)
    assert daemon.wait_until(third, "active")["leases"][0]["gpu"] == gpus[1]


def test_a_gang_gets_both_gpus_or_none(daemon: Daemon) -> None:
    daemon.wait_until(daemon.submit("--mem", "6G", "--", "sleep", "60"), "active")
    gang = daemon.submit("--gpus", "2", "--mem", "4G", "--", "sleep", "60")
    assert daemon.job(gang)["leases"] == []
    # A gang that fits starts at once.
    out = daemon.run(
        "run", "--gpus", "2", "--mem", "1G", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"
    ).stdout
    assert daemon.job(gang)["leases"] == []
    assert set(out.strip().split(",")) == {gpu["uuid"] for gpu in daemon.status()["gpus"]}


def test_what_can_never_fit_is_refused_at_once_with_what_would(daemon: Daemon) -> None:
    done = daemon.run("run", "--mem", "30G", "--", "true", check=False)
    assert done.returncode == 125
    assert mentions(done.stderr, "30G", "8G")
    assert "hint:" in done.stderr


def test_who_does_not_want_to_wait_gives_up_with_75_and_leaves_nothing_behind(
    daemon: Daemon,
) -> None:
    for _ in range(2):
        daemon.wait_until(daemon.submit("--mem", "6G", "--", "sleep", "60"), "active")
    done = daemon.run("run", "--mem", "7G", "--no-wait", "--", "true", check=False)
    assert done.returncode == 75
    assert mentions(done.stderr, "7G", "GPU 0", "GPU 1", "2G")
    done = daemon.run("run", "--mem", "7G", "--wait", "1s", "--", "true", check=False)
    assert done.returncode == 75
    assert [job["state"] for job in daemon.status()["jobs"]] == ["active", "active"]


def test_a_dry_run_says_what_would_happen_and_submits_nothing(daemon: Daemon) -> None:
    fits = daemon.run("run", "--mem", "6G", "--dry-run", "--", "true")
    assert mentions(fits.stdout, "would start now", "GPU 0")
    first, second = (
        daemon.submit("--mem", "6G", "--time", "1h", "--", "sleep", "60") for _ in range(2)
    )
    for job in (first, second):
        daemon.wait_until(job, "active")
    done = daemon.run("run", "--mem", "7G", "--dry-run", "--json", "--", "true", check=False)
    assert done.returncode == 75
    said = json.loads(done.stdout)
    assert (said["starts_now"], said["position"], said["waits_for"]) == (False, 1, [first, second])
    assert said["suggestions"] == [{"options": "--mem 2G", "before": None}]
    assert said["expected_start_at"] is not None
    probably = said["expected_start"]
    assert probably["from_at"] <= said["expected_start_at"] <= probably["until_at"]
    assert probably["after"] in (first, second)
    never = daemon.run("run", "--mem", "30G", "--dry-run", "--", "true", check=False)
    assert never.returncode == 125
    assert [job["id"] for job in daemon.status()["jobs"]] == [first, second]
    waiting = daemon.submit("--mem", "7G", "--", "true")
    shown = daemon.job(waiting)
    assert shown["id"] == second + 1
    assert shown["suggestions"] == said["suggestions"]
    wait_for("it is planned", lambda: daemon.job(waiting)["expected_start_at"])
    # By what ran before on this daemon, it is one or the other.
    for verb in (["list"], ["show", str(waiting)], ["status"]):
        assert re.search(r"\b(soon|within \w+ h(our)?)\b", daemon.run(*verb).stdout)
    daemon.cancel(first)
    daemon.wait_until(waiting, "ended")
    report = json.loads(daemon.run("report", "--json").stdout)
    assert report["predictions"]["starts"] > 0
    assert report["predictions"]["start_error"] > 0
    # Jobs of other tests are cancelled before others are expected to start.
    assert 0 < report["predictions"]["in_range"] <= report["predictions"]["ranges"]


def test_a_dry_run_says_what_blocks_a_job_other_than_memory(daemon: Daemon) -> None:
    def said(*options: str) -> dict[str, Any]:
        done = daemon.run("run", "--dry-run", "--json", *options, "--", "true", check=False)
        assert done.returncode == 75
        return dict(json.loads(done.stdout), text=done.stdout)

    job = daemon.submit("--mem", "7G", "--gpus", "2", "--preemptible", "--", "sleep", "60")
    daemon.wait_until(job, "active")
    assert mentions(said("--mem", "1G", "--after", str(job))["reason"], f"job {job}")
    unknown = daemon.run("run", "--dry-run", "--after", "999", "--", "true", check=False)
    assert (unknown.returncode, unknown.stdout) == (125, "")
    failed = daemon.submit("--mem", "1G", "--", "false")
    daemon.wait_until(failed, "ended")
    never = daemon.run("run", "--dry-run", "--after", str(failed), "--", "true", check=False)
    assert never.returncode == 125
    assert mentions(never.stdout, "would not start", f"job {failed} did not succeed")
    assert mentions(said("--held")["reason"], "held")
    later = said("--begin", "+2h")
    assert later["begin_at"] is not None
    assert later["begin_at"] <= later["expected_start_at"]

    preempting = said("--mem", "4G", "--gpus", "2")
    assert (preempting["preempts"], preempting["waits_for"]) == ([job], [job])
    done = daemon.run("run", "--mem", "4G", "--gpus", "2", "--dry-run", "--", "true", check=False)
    assert mentions(done.stdout, f"job {job} has made way")

    daemon.run("pause")
    held_up, closed = said("--mem", "4G", "--gpus", "2"), daemon.status()["closed"]
    daemon.run("unpause")
    assert held_up["reason"] == closed
    assert held_up["expected_start_at"] is None
    assert daemon.job(job)["state"] == "active"


def test_alone_on_a_gpu_means_alone(daemon: Daemon) -> None:
    alone = daemon.wait_until(daemon.submit("--exclusive", "--", "sleep", "60"), "active")
    assert alone["leases"][0]["memory"] == 8 * G
    other = daemon.wait_until(daemon.submit("--mem", "1G", "--", "sleep", "60"), "active")
    assert other["leases"][0]["gpu"] != alone["leases"][0]["gpu"]


def test_status_keeps_its_contract(daemon: Daemon) -> None:
    job = daemon.submit("--mem", "3G", "--name", "held", "--time", "1h", "--", "sleep", "60")
    daemon.wait_until(job, "active")
    shown = daemon.status()
    assert {"host", "driver", "gpus", "jobs"} <= set(shown)
    gpu = next(gpu for gpu in shown["gpus"] if gpu["memory"]["leased"])
    assert {"index", "uuid", "name", "state", "utilization", "temperature"} <= set(gpu)
    assert gpu["state"] == "available"
    assert gpu["memory"]["total"] == gpu["memory"]["allocatable"] == 8 * G
    assert (gpu["memory"]["leased"], gpu["memory"]["headroom"]) == (3 * G, 5 * G)
    (row,) = shown["jobs"]
    assert (row["id"], row["name"], row["state"]) == (job, "held", "active")
    claim = {"memory": 3 * G, "share": None, "gpus": 1, "exclusive": False, "time_limit": 3600.0}
    assert row["claim"].items() >= claim.items()
    assert set(row["leases"][0]) == {
        *("gpu", "memory", "used", "peak", "enforced_by", "driver_limit", "over_since_at"),
        *("stops_at", "needed", "pools", "shared_with", "memory_bound"),
    }
    assert row["submitted_at"].endswith("Z")


def test_both_patiences_are_told(daemon: Daemon) -> None:
    runs = daemon.submit("--mem", "8G", "--gpus", "2", "--", "sleep", "60")
    daemon.wait_until(runs, "active")
    patient = daemon.submit("--mem", "8G", "--wait", "1h", "--grace", "90s", "--", "true")
    running, waiting = daemon.job(runs), daemon.job(patient)
    assert (running["grace"], running["gives_up_at"]) == (2.0, None)
    assert (waiting["grace"], waiting["state"]) == (90.0, "queued")
    submitted = datetime.fromisoformat(waiting["submitted_at"])
    assert datetime.fromisoformat(waiting["gives_up_at"]) - submitted == timedelta(hours=1)
    assert mentions(daemon.run("cancel", str(runs)).stdout, f"job {runs} ", "2s")


def test_what_a_job_uses_shows_up_on_its_gpu(daemon: Daemon) -> None:
    hog = "import time; held = b'x' * (1 << 29); print('up', flush=True); time.sleep(60)"
    job = daemon.submit("--mem", "2G", "--", "python3", "-c", hog)
    lease = wait_for(
        "the resident memory is seen",
        lambda: next(
            (each for each in daemon.job(job)["leases"] if (each["used"] or 0) >= 1 << 29), None
        ),
    )
    assert lease["used"] < G
    assert lease["peak"] >= lease["used"]
    gpu = next(gpu for gpu in daemon.status()["gpus"] if gpu["uuid"] == lease["gpu"])
    assert gpu["memory"]["unmanaged"] == 0
    assert [process["job"] for process in gpu["processes"]] == [job]


def test_a_stranger_is_named_and_subtracted(daemon: Daemon) -> None:
    gpu = daemon.status()["gpus"][0]
    hog = "import time; held = b'x' * (1 << 30); print('up', flush=True); time.sleep(600)"
    stranger = subprocess.Popen(
        ["python3", "-c", hog], env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": gpu["uuid"]}
    )
    try:

        def seen() -> dict[str, object] | None:
            processes = daemon.status()["gpus"][0]["processes"]
            return next(
                (p for p in processes if p["pid"] == stranger.pid and p["memory"] >= G), None
            )

        process = wait_for("the stranger is seen", seen)
        assert process["job"] is None
        assert process["user"]
        assert "python3 -c" in str(process["command"])
        shown = daemon.run("status").stdout
        assert str(stranger.pid) in shown
        refused = daemon.run(
            "run", "--mem", "7.5G", "--gpus", "2", "--no-wait", "--", "true", check=False
        )
        assert refused.returncode == 75
        assert "GPU 0" in refused.stderr
    finally:
        stranger.kill()
        stranger.wait()


def test_detached_prints_the_id_alone_and_the_output_is_kept(daemon: Daemon) -> None:
    done = daemon.run("run", "-d", "--mem", "1G", "--", "sh", "-c", "echo one; echo two >&2")
    job = int(done.stdout)
    daemon.wait_until(job, "ended")
    logs = daemon.run("logs", str(job))
    assert (logs.stdout, logs.stderr) == ("one\n", "two\n")


def test_following_the_logs_ends_with_the_job(daemon: Daemon, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo one; while ! test -e {gate}; do sleep 0.05; done; echo two"
    job = daemon.submit("--mem", "1G", "--", "sh", "-c", script)
    following = daemon.open("logs", "-f", str(job), stdout=subprocess.PIPE)
    assert following.stdout is not None
    assert following.stdout.readline() == b"one\n"
    gate.touch()
    assert following.communicate(timeout=120)[0] == b"two\n"


def test_a_time_limit_ends_the_job_with_124(daemon: Daemon) -> None:
    done = daemon.run("run", "--mem", "1G", "--time", "1s", "--", "sleep", "60", check=False)
    assert done.returncode == 124
    job = max(daemon.jobs(), key=lambda each: int(each["id"]))
    assert (job["state"], job["outcome"], job["exit_status"]) == ("ended", "time_limit", 124)


def test_a_job_lasts_until_its_last_process_has_gone(daemon: Daemon) -> None:
    job = daemon.submit("--mem", "1G", "--", "sh", "-c", "setsid sleep 60 & exit 3")
    events = lambda: {event["kind"] for event in daemon.job(job)["events"]}  # noqa: E731
    wait_for("the main process is gone", lambda: "main_exited" in events())
    assert daemon.job(job)["state"] == "active"
    daemon.cancel(job)
    assert daemon.wait_until(job, "ended")["outcome"] == "cancelled"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--mem", "0", "true"], 2, "0"),
        (["--mem", "4X", "true"], 2, "size"),
        (["--mem", "999T", "true"], 125, "999T"),
        (["--mem", "1G", "--gpus", "3", "true"], 125, "2"),
        (["--mem", "1G", "--time", "soon", "true"], 2, "soon"),
        (["--mem", "1G", "no-such-command"], 127, "no-such-command"),
        (["--mem", "1G", "/etc/passwd"], 126, "/etc/passwd"),
    ],
)
def test_bad_input_gets_one_clear_sentence_and_a_hint(
    daemon: Daemon, arguments: list[str], status: int, says: str
) -> None:
    before = len(daemon.jobs())
    done = daemon.run("run", *arguments, check=False)
    assert done.returncode == status, done
    assert says in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.split("\n\nhint:")[0].strip().splitlines()) == 1
    assert len(daemon.jobs()) == before


def test_a_removed_working_directory_is_told(daemon: Daemon, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'rmdir "$PWD"; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *daemon.gpulease("run", "--mem", "1G", "--", "true")],
        cwd=gone, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 125
    assert "directory" in done.stderr
    assert "Traceback" not in done.stderr
