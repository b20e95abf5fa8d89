"""`gpulease.lease` in the queue: what it says, what interrupts it, and what does not."""

import signal

from daemon_rig import Daemon, wait_for
from e2e.python_process import Process, refusal, run
from goldens import mentions

LEASE = 'lease = gpulease.lease("1G")\ntell(lease.id)\ninput()'


def full(daemon: Daemon) -> int:
    """Fill the GPUs, and return the job that does."""
    filler = daemon.submit("--mem", "8G", "--gpus", "2", "--", "sleep", "1000")
    daemon.wait_until(filler, "active")
    return filler


def waiting(daemon: Daemon, script: str = LEASE) -> tuple[int, Process]:
    """Return the job that fills the GPUs, and a process that waits for job 2."""
    filler = full(daemon)
    process = Process(daemon, script)
    wait_for("it is queued", lambda: len(daemon.status()["jobs"]) == 2)
    return filler, process


def test_wait_0_gives_up_at_once_and_a_span_after_it(daemon: Daemon) -> None:
    full(daemon)
    told = run(
        daemon,
        refusal("NoRoomNow", "gpulease.lease('1G', wait=0)")
        + refusal("NoRoomNow", "gpulease.lease('1G', wait='1s')"),
    )
    assert told.count("\n\nhint: ") == 2
    assert [job["state"] for job in daemon.status()["jobs"]] == ["active"]


def test_it_says_why_it_waits_and_gets_the_lease(daemon: Daemon) -> None:
    filler, process = waiting(daemon)
    said = process.warned()
    assert said.startswith("gpulease: job 2 ") and mentions(said, "1G", f"job {filler}")
    daemon.cancel(filler)
    assert process.told() == "2"
    process.end()


def test_ctrl_c_leaves_the_queue(daemon: Daemon) -> None:
    _, process = waiting(
        daemon,
        """\
        try:
            gpulease.lease("1G")
        except KeyboardInterrupt:
            tell("interrupted", "GPULEASE_JOB" in os.environ)
        input()
        """,
    )
    process.warned()
    process.popen.send_signal(signal.SIGINT)
    assert process.told() == "interrupted False"
    assert daemon.wait_until(2, "ended")["outcome"] == "cancelled"
    process.end()


def test_a_wait_that_somebody_cancels_ends_with_an_error(daemon: Daemon) -> None:
    _, process = waiting(daemon, refusal("GpuleaseError"))
    daemon.cancel(2)
    assert "job 2 " in process.end()[0]


def test_a_wait_outlasts_a_restart_of_the_daemon(daemon: Daemon) -> None:
    filler, process = waiting(daemon)
    daemon.kill()
    daemon.start()
    daemon.cancel(filler)
    assert process.told() == "2"
    process.end()
    assert daemon.wait_until(2, "ended")["outcome"] == "released"


def test_while_a_thread_waits_another_is_refused(daemon: Daemon) -> None:
    full(daemon)
    script = """\
import threading, time
threading.Thread(target=lambda: gpulease.lease("1G"), daemon=True).start()
while len(gpulease.Client().jobs().jobs) < 2:
    time.sleep(0.01)
"""
    told = run(daemon, script + refusal("AlreadyLeased"))
    assert "thread" in told


def test_a_release_without_a_daemon_warns_and_can_be_tried_again(daemon: Daemon) -> None:
    process = Process(
        daemon,
        """\
        lease = gpulease.lease("1G")
        tell("held")
        for _ in range(2):
            input()
            lease.release()
            tell(lease.held, "GPULEASE_JOB" in os.environ)
        """,
    )
    assert process.told() == "held"
    daemon.kill()
    process.go_on()
    assert process.told() == "True True"
    daemon.start()
    out, err = process.end()
    assert out == "False False\n"
    assert "LeaseKept: " in err
    assert daemon.wait_until(1, "ended")["outcome"] == "released"
