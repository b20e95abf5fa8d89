"""`gpulease edit`, `move`, `pause` and `cancel` of many, on a real daemon."""

import json
from collections.abc import Iterator

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions


@pytest.fixture(autouse=True)
def empty_queue(daemon: Daemon) -> Iterator[None]:
    """Let each test begin and end without jobs."""
    yield
    daemon.run("unpause")
    daemon.run("cancel", "--all")
    for job in daemon.status()["jobs"]:
        daemon.wait_until(job["id"], "ended")


def held(daemon: Daemon, *options: str) -> int:
    return daemon.submit("--mem", "1G", "--held", *options, "--", "sleep", "600")


def refused(daemon: Daemon, *arguments: str) -> str:
    done = daemon.run(*arguments, check=False)
    assert done.returncode in (2, 125), done
    return done.stderr


def test_a_waiting_job_is_edited_and_its_history_says_what_changed(daemon: Daemon) -> None:
    first, job = held(daemon), held(daemon)
    line = ("--mem", "2G", "--time", "2h", "--nice", "5", "--priority", "low", "--name", "other")
    done = daemon.run("edit", str(job), *line, "--after", f"{first}:any", "--begin", "+1d")
    assert mentions(done.stdout, "memory 1G to 2G", "nice 0 to 5", "priority normal to low")
    shown = daemon.job(job)
    assert (shown["claim"]["memory"], shown["claim"]["time_limit"]) == (2 << 30, 7200)
    queue = shown["queue"]
    assert (queue["nice"], queue["priority"], queue["held"]) == (5, "low", True)
    assert queue["after"] == [f"{first}:any"]
    assert queue["begin_at"] is not None
    assert shown["events"][-1]["kind"] == "edit"
    assert mentions(shown["events"][-1]["detail"], "name sleep to other")
    refused(daemon, "edit", str(first), "--after", "other")

    daemon.run("edit", "other", "--after", "none", "--begin", "now", "--time", "none", "--no-held")
    assert daemon.wait_until(job, "active")["claim"]["time_limit"] is None
    hint = refused(daemon, "edit", str(job), "--time", "1h")
    assert mentions(hint, "extend", "requeue")


def test_ram_and_cores_of_a_waiting_job_are_named_and_taken_away(daemon: Daemon) -> None:
    asked = ("--mem", "1G", "--linked", "--ram", "64M", "--cpus", "1", "--held")
    done = daemon.run("run", "-d", *asked, "--", "true")
    assert mentions(done.stderr, "--linked", "--gpus")
    job = int(done.stdout)
    assert mentions(daemon.job(job)["events"][0]["detail"], "1G", "64M", "cpus 1")
    daemon.run("edit", str(job), "--ram", "none", "--cpus", "none")
    claim = daemon.job(job)["claim"]
    assert (claim["ram"], claim["cpus"]) == (None, None)
    daemon.run("edit", str(job), "--cpus", "1")
    assert daemon.job(job)["claim"]["cpus"] == 1
    assert mentions(refused(daemon, "edit", str(job), "--cpus", "few"), "few")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--cpus", "0"), ("--cpus", "-1"), ("--gpu-model", ""), ("--ram", "0"), ("--time", "0")],
)
def test_what_run_refuses_edit_refuses_for_the_same_reason(
    daemon: Daemon, option: str, value: str
) -> None:
    job = held(daemon, "--cpus", "1")
    why = refused(daemon, "run", option, value, "true")
    assert why and refused(daemon, "edit", str(job), option, value) == why
    assert daemon.job(job)["claim"]["cpus"] == 1


def test_the_waiting_elements_of_an_array_are_edited_together(daemon: Daemon) -> None:
    array = daemon.submit("--mem", "1G", "--held", "--array", "0-29", "--", "sleep", "600")
    element = json.loads(daemon.run("show", "--json", f"{array}_3").stdout)["id"]
    daemon.run("edit", f"{array}_3", "--no-held")
    daemon.wait_until(element, "active")
    assert mentions(daemon.run("edit", str(array), "--nice", "4").stdout, "29 jobs")
    nice = [job["queue"]["nice"] for job in daemon.status()["jobs"]]
    assert sorted(nice) == [0] + 29 * [4]
    assert mentions(daemon.run("cancel", str(array), "--grace", "1s").stdout, "29", "1 job")


def test_a_moved_job_starts_first(daemon: Daemon) -> None:
    running = daemon.submit("--mem", "8G", "--gpus", "2", "--", "sleep", "600")
    daemon.wait_until(running, "active")
    first, second, third = (
        daemon.submit("--mem", "8G", "--gpus", "2", "--", "sleep", "600") for _ in range(3)
    )
    assert mentions(daemon.run("move", str(third), "--before", str(second)).stdout, str(second))
    daemon.run("move", str(second), "--first")
    refused(daemon, "move", str(second), "--before", str(second))
    refused(daemon, "move", str(second))
    refused(daemon, "move", str(running), "--first")
    started: list[int] = []

    def newly_started() -> int | None:
        left = (job for job in (first, second, third) if job not in started)
        return next((job for job in left if daemon.job(job)["state"] == "active"), None)

    for _ in range(3):
        daemon.run("cancel", "--grace", "1s", str(running))
        running = wait_for("the next job starts", newly_started) or 0
        started.append(running)
    assert started == [second, first, third]


def test_a_paused_queue_says_so_everywhere_and_survives_a_restart(daemon: Daemon) -> None:
    running = daemon.submit("--mem", "1G", "--", "sleep", "600")
    daemon.wait_until(running, "active")
    assert mentions(daemon.run("pause", "--why", "new driver").stdout, "new driver")
    waiting = daemon.submit("--mem", "1G", "--", "sleep", "600")
    assert daemon.run("run", "--mem", "1G", "--no-wait", "true", check=False).returncode == 75
    daemon.kill()
    daemon.start()
    status = daemon.status()
    assert (status["paused"]["by"], status["paused"]["why"]) == ("root", "new driver")
    assert "new driver" in status["closed"]
    assert mentions(daemon.run("status").stdout, "root paused the queue", "new driver")
    shown = daemon.job(waiting)
    assert (shown["state"], daemon.job(running)["state"]) == ("queued", "active")
    assert "new driver" in shown["reason"]
    daemon.run("unpause")
    daemon.wait_until(waiting, "active")
    assert daemon.status()["closed"] is None
    refused(daemon, "pause", "--why", "x" * 500)


def test_more_jobs_than_fit_a_screen_are_cancelled_in_one_line(daemon: Daemon) -> None:
    for number in range(25):
        held(daemon, "--name", f"sweep-{number}")
    done = daemon.run("cancel", "--name", "sweep-*")
    assert done.stdout == "25 jobs are cancelled\n"
    assert mentions(done.stderr, "25 jobs", "and 15 more")
    assert daemon.run("cancel", "--user", "root").returncode == 0
    refused(daemon, "cancel", "17", "--user", "root")
    refused(daemon, "cancel", "--name", "sweep-*")


def test_resume_without_a_gpu_starts_jobs_again(daemon: Daemon) -> None:
    daemon.run("pause", "--why", "maintenance")
    job = daemon.submit("--mem", "1G", "true")
    assert daemon.job(job)["state"] == "queued"
    assert daemon.run("resume").stdout == "jobs start again\n"
    daemon.wait_until(job, "ended")
    assert "not paused" in daemon.run("resume").stdout
