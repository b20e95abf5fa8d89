"""The order of the queue, as a real daemon keeps it."""

from collections.abc import Callable

from daemon_rig import Daemon

SLEEP = ("--", "sleep", "600")


def test_a_small_job_does_not_wait_behind_one_that_it_cannot_delay(
    make_daemon: Callable[..., Daemon],
) -> None:
    """Four GPUs have 2 GiB free each, the first job in the queue waits for 4 GiB."""
    daemon = make_daemon(simulate="4x8G").start()
    for _ in range(4):
        daemon.wait_until(daemon.submit("--mem", "6G", *SLEEP), "active")
    head = daemon.submit("--mem", "4G", *SLEEP)
    small = daemon.submit("--mem", "1G", "--time", "5s", "--", "true")
    daemon.wait_until(small, "ended")
    assert daemon.job(head)["state"] == "queued"


def test_a_guard_that_is_set_keeps_jobs_apart_on_simulated_gpus_too(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(
        simulate="1x8G", settings={"grace": "2s"}, tables="[queue]\nmost_utilization = 0.5\n"
    ).start()
    first, second = (daemon.submit("--mem", "1G", *SLEEP) for _ in range(2))
    daemon.wait_until(first, "active")
    assert daemon.job(second)["state"] == "queued"
    daemon.cancel(first)
    daemon.wait_until(second, "active")
