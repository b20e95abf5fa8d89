"""Arrays, dependencies, begin times and held jobs: what a user types, against a real daemon."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta

from daemon_rig import Daemon, wait_for
from goldens import mentions

_SAYS = "echo $GPULEASE_ARRAY_JOB $GPULEASE_ARRAY_INDEX $GPULEASE_JOB"


def _array(daemon: Daemon, indices: str, *command: str, options: tuple[str, ...] = ()) -> int:
    done = daemon.run("run", "--mem", "1G", "--array", indices, *options, "--", *command)
    return int(done.stdout)


def _elements(daemon: Daemon, array: int) -> list[str]:
    return [job.state for job in daemon.client.elements(array)]


def test_each_element_has_its_index_its_id_and_its_output(daemon: Daemon) -> None:
    array = _array(daemon, "3,5", "sh", "-c", _SAYS)
    wait_for("the end of both", lambda: _elements(daemon, array) == ["ended", "ended"])
    for place, index in enumerate((3, 5)):
        said = daemon.run("logs", f"{array}_{index}").stdout.split()
        assert said == [str(array), str(index), str(array + place)]
    whole = daemon.run("logs", str(array), check=False)
    assert whole.returncode == 2
    assert mentions(whole.stderr, f"{array}_3")
    both = daemon.run("logs", f"{array}_3", f"{array}_5")
    assert mentions(both.stderr, f"output of job {array}_3 (", f"output of job {array}_5 (")
    for word in (str(array), "last"):
        page = daemon.run("show", word).stdout
        assert mentions(page, f"array {array}", "3,5", "2 succeeded")
    listed = json.loads(daemon.run("show", "--json", str(array)).stdout)
    assert [job["label"] for job in listed["jobs"]] == [f"{array}_3", f"{array}_5"]


def test_a_limit_runs_so_many_at_once_and_alike_elements_share_a_row(daemon: Daemon) -> None:
    array = _array(daemon, "0-9%2", "sleep", "60")
    for index in (0, 1):
        daemon.wait_until(array + index, "active")
    for verb in ("status", "list"):
        wait_for(
            "one row for the others",
            lambda verb=verb: text if f"{array}_[2-9]" in (text := daemon.run(verb).stdout) else "",
        )
    assert _elements(daemon, array).count("active") == 2
    assert mentions(daemon.job(array + 5)["reason"], "at most 2 elements")
    assert daemon.job(array + 5)["queue"]["blocked_by"] == "array"
    assert daemon.job(array + 5)["position"] is None


def test_a_gpu_names_the_element_that_has_it_or_waits_for_it(
    make_daemon: Callable[..., Daemon],
) -> None:
    # Otherwise memory is kept after a time that depends on the run times of other tests' jobs.
    early = '[queue]\nsoft_reservation_after = "1s"\n'
    daemon = make_daemon(settings={"grace": "2s"}, tables=early).start()
    blocking = daemon.submit("--mem", "1G", "--gpu", "0", "--", "sleep", "60")
    daemon.wait_until(blocking, "active")
    array = _array(daemon, "7", "sleep", "60", options=("--gpu", "0", "--exclusive"))
    wait_for("memory is kept", lambda: f"kept for job {array}_7" in daemon.run("status").stdout)
    daemon.cancel(blocking)
    daemon.wait_until(array, "active")
    assert f"exclusive: job {array}_7" in daemon.run("status").stdout


def test_cancel_ends_one_element_or_the_whole_array(daemon: Daemon) -> None:
    array = _array(daemon, "0-4%1", "sleep", "60")
    daemon.wait_until(array, "active")
    done = daemon.run("cancel", f"{array}_2").stdout
    assert mentions(done, f"{array}_2", "cancelled")
    assert _elements(daemon, array).count("ended") == 1
    done = daemon.run("cancel", str(array)).stdout
    assert mentions(done, f"array {array}", "3 jobs")
    wait_for("the end of all", lambda: _elements(daemon, array) == ["ended"] * 5)


def test_dependencies_start_end_or_wait_for_a_whole_array(daemon: Daemon) -> None:
    gate = daemon.submit("--mem", "1G", "--held", "--", "false")
    array = _array(daemon, "0-1", "true", options=("--after", f"{gate}:any"))
    after = daemon.run("run", "-d", "--mem", "1G", "--after", str(array), "--", "true")
    never = daemon.run("run", "-d", "--mem", "1G", "--after", str(gate), "--", "true")
    wait_for("the reason", lambda: "not before" in (daemon.job(array)["reason"] or ""))
    assert daemon.job(int(after.stdout))["queue"]["after"] == [f"{array}:ok"]
    daemon.cancel(gate)
    assert daemon.wait_until(int(after.stdout), "ended")["exit_status"] == 0
    ended = daemon.wait_until(int(never.stdout), "ended")
    assert ended["outcome"] == "dependency_failed"
    assert mentions(ended["reason"], f"job {gate}")
    late = daemon.run("run", "--mem", "1G", "--after", f"{gate}", "--", "true", check=False)
    assert late.returncode == 125
    assert mentions(late.stderr, f"job {gate}")
    unknown = daemon.run("run", "--mem", "1G", "--after", "99999", "--", "true", check=False)
    assert unknown.returncode != 0
    assert mentions(unknown.stderr, "99999")


def test_a_job_begins_at_its_time_and_delays_nobody_before(daemon: Daemon) -> None:
    later = daemon.run("run", "-d", "--mem", "8G", "--begin", "+2s", "--", "true")
    job = int(later.stdout)
    wait_for("the reason", lambda: "begin" in (daemon.job(job)["reason"] or ""))
    assert daemon.run("run", "--mem", "7G", "--", "true").returncode == 0
    ended = daemon.wait_until(job, "ended")
    begin, granted = (
        datetime.fromisoformat(each) for each in (ended["queue"]["begin_at"], ended["granted_at"])
    )
    assert timedelta(0) <= granted - begin < timedelta(seconds=30)


def test_a_thousand_elements_are_queued_listed_and_cancelled(daemon: Daemon) -> None:
    array = _array(daemon, "0-999%1", "sleep", "60")
    daemon.run("show", str(array))
    daemon.run("cancel", str(array))
    daemon.wait_until(array, "ended")
    assert not daemon.client.elements(array, everything=False)


def test_an_array_survives_a_kill_of_the_daemon(daemon: Daemon) -> None:
    array = _array(daemon, "0-7%2", "sh", "-c", "sleep 0.3; echo done")
    after = daemon.run("run", "-d", "--mem", "1G", "--after", str(array), "--", "true")
    for ended in (1, 3, 5):
        wait_for("some have ended", lambda n=ended: _elements(daemon, array).count("ended") >= n)
        daemon.kill()
        daemon.start()
    daemon.wait_until(int(after.stdout), "ended")
    assert [job.exit_status for job in daemon.client.elements(array)] == [0] * 8
    for index in range(8):
        assert daemon.run("logs", f"{array}_{index}").stdout == "done\n"


def test_the_index_is_put_into_the_command(daemon: Daemon) -> None:
    array = int(daemon.run("run", "--mem", "1G", "--array", "3-4", "echo", "--seed={}").stdout)
    daemon.wait_until(array + 1, "ended")
    assert daemon.run("logs", f"{array}_4").stdout == "--seed=4\n"


def test_a_grid_is_an_array_of_all_combinations(daemon: Daemon) -> None:
    line = ("--grid", "lr=1e-3,1e-4", "--grid", "seed=0-1", "--name", "sweep")
    shows = ("sh", "-c", "echo $lr $seed $0", "{lr}/{seed}")
    array = int(daemon.run("run", "--mem", "1G", *line, *shows).stdout)
    for job in range(array, array + 4):
        daemon.wait_until(job, "ended")
    names = [daemon.job(job)["name"] for job in range(array, array + 4)]
    assert names == [f"sweep lr={lr} seed={seed}" for lr in ("1e-3", "1e-4") for seed in (0, 1)]
    assert daemon.run("logs", f"{array}_2").stdout == "1e-4 0 1e-4/0\n"

    held = int(daemon.run("run", "--mem", "1G", "--held", *line, "true").stdout)
    (row,) = json.loads(daemon.run("status", "--json", "--queue", "1").stdout)["jobs"]
    assert (row["name"], row["queue"]["array_waiting"]["indices"]) == ("sweep", "0-3")
    daemon.run("cancel", str(held))

    again = int(daemon.run("again", f"{array}_2").stdout)
    assert daemon.wait_until(again, "ended")["name"] == names[2]
    assert daemon.run("logs", f"{again}_2").stdout == "1e-4 0 1e-4/0\n"
    refused = daemon.run("run", *line, "--array", "4", "true", check=False)
    assert (refused.returncode, "there are 4 combinations" in refused.stderr) == (2, True)
