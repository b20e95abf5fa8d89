"""What the commands answer to values that are empty, unknown or far too long."""

import pytest

from daemon_rig import Daemon

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (["hold", "--mem", "1G", "--pid", "0"], "cannot use PID 0"),
        (["plot", "--gpu", ""], "name a job, or a GPU"),
        (["reserve", "--cancel", ""], "the name of a window is empty"),
        (["edit", "1", "--cpus", DIGITS], "not a whole number"),
        (["run", "--retries", "1", "--retry-on", DIGITS, "true"], "no exit code"),
        (["run", "--retry-oom", DIGITS, "true"], "not a factor"),
        (["cancel", "--user", ""], "no such user"),
        (["cancel", "--user", "nobody-of-this-name"], "no such user"),
        (["report", "--user", ""], "no such user"),
        (["report", "--shares", "--user", "nobody-of-this-name"], "no such user"),
    ],
)
def test_what_is_empty_unknown_or_too_long_is_refused_with_a_reason(
    standing: Daemon, line: list[str], why: str
) -> None:
    done = standing.run(*line, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr and len(done.stderr) < 300


def test_a_listing_of_certain_jobs_does_not_say_that_none_waits_or_runs(standing: Daemon) -> None:
    job = standing.submit("--mem", "1G", "--held", "--name", "first", "--", "true")
    for line in (("list", "--name", "second"), ("list", "--state", "lost"), ("history", "-n", "x")):
        assert standing.run(*line).stdout.startswith("no such job")
    standing.cancel(job)
