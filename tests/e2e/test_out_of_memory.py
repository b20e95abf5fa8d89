"""A job that runs out of GPU memory: what its owner is told, and that it is tried again."""

import shlex
import sys

from daemon_rig import Daemon, wait_for
from goldens import mentions

SAYS_SO = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has"
NEEDS = (
    f"test $(($GPULEASE_MEMORY >> 20)) -ge {{}} && echo enough || {{{{ echo {shlex.quote(SAYS_SO)} "
    ">&2; exit 1; }}"
)
"""A command that needs so many MiB."""


def needs(mebibytes: int, first: str = "true") -> tuple[str, ...]:
    return "sh", "-c", f"{first}; {NEEDS}".format(mebibytes).replace("{{", "{").replace("}}", "}")


def test_the_owner_is_told_what_to_ask_for(daemon: Daemon) -> None:
    done = daemon.run("run", "--mem", "2G", *needs(4096), check=False)

    assert done.returncode == 1
    assert mentions(done.stderr, "2G", "hint: ", "--mem 2.5G", "--retry-oom 1.5x")
    job = daemon.job(1)
    assert job["out_of_memory"] is True
    assert "--mem 2.5G" in job["hint"]
    assert job["retried_as"] is None


def test_a_job_that_ended_while_the_daemon_was_dead_is_tried_again_once(daemon: Daemon) -> None:
    gate = daemon.folder / "gate"
    wait = f"until test -e {gate}; do sleep 0.05; done"
    job = daemon.submit("--mem", "1G", "--retry-oom", "2x", *needs(2000, wait))
    daemon.wait_until(job, "active")
    record = daemon.state / "jobs" / str(job) / "record"

    daemon.kill()
    gate.touch()
    wait_for("its shim noted the end", lambda: b'"exited"' in record.read_bytes())
    daemon.start()
    chain = daemon.tries(job)
    daemon.kill()
    daemon.start()

    assert [each["exit_status"] for each in chain] == [1, 0]
    listed = daemon.run("list", "--all", "--json").stdout
    assert listed.count('"retry_of": 1') == 1


HOLDS = """
import os, sys, time
held = b'x' * (int(sys.argv[1]) << 20)
while not os.path.exists(sys.argv[2]): time.sleep(0.05)
"""


def test_a_script_that_names_no_size_gets_what_it_used_before(daemon: Daemon) -> None:
    script = daemon.folder / "train.py"
    script.write_text(HOLDS)
    go = daemon.folder / "go"
    command = (sys.executable, str(script))
    first = daemon.submit("--mem", "2G", *command, "700", str(go))
    daemon.wait_until(first, "active")
    wait_for("it is seen", lambda: (daemon.job(first)["leases"][0]["peak"] or 0) >= 700 << 20)
    go.touch()
    daemon.wait_until(first, "ended")

    second = daemon.run("run", "-d", *command, "650", str(go))

    job = daemon.wait_until(int(second.stdout), "ended")
    used = daemon.job(first)["leases"][0]["needed"]
    assert 700 << 20 <= used <= 800 << 20
    assert job["claim"]["memory"] == 896 << 20 if used * 1.15 <= 896 << 20 else 1 << 30
    assert mentions(second.stderr, "train.py used up to 7", "1 run", "--mem")
