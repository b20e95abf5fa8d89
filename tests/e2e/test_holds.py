"""Leases without a job: they end with whom they are for, whatever happens to the daemon."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for
from e2e.asking import G, client, hold, leased, variables, when_in
from gpulease.errors import BadValue, WrongState
from gpulease.wire.requests import ClaimRequest, HoldRequest, from_wire

# Asks for a lease, tells its id, and waits; what it asked for is for the process that it names.
_ASK = """
import sys
from pathlib import Path
from gpulease.client import Client
from gpulease.wire.requests import ClaimRequest, HoldRequest
path, pid, memory = sys.argv[1:]
held = Client(Path(path)).hold(HoldRequest({}, int(pid), ClaimRequest(memory=int(memory))))
print(held.id, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon(shared: Daemon) -> Daemon:
    return shared


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_its_owner_gives_it_back_and_the_holder_lives_on(
    daemon: Daemon, holder: subprocess.Popen[bytes]
) -> None:
    job = hold(daemon, holder.pid)
    when_in(daemon, job, "active")
    client(daemon).cancel(job)
    ended = when_in(daemon, job, "ended")
    assert ended.outcome == "released"
    assert ended.user in (ended.reason or "")
    assert holder.poll() is None
    with pytest.raises(WrongState):
        client(daemon).cancel(job)


def test_it_ends_with_its_time(daemon: Daemon, holder: subprocess.Popen[bytes]) -> None:
    for pid in (holder.pid, None):
        ended = when_in(daemon, hold(daemon, pid, time_limit=1), "ended")
        assert ended.outcome == "time_limit"
        said = {each.kind: each.detail for each in client(daemon).job(ended.id).events}
        assert said["worker_started"] == (None if pid is None else f"pid {pid}")
        assert said["worker_exited"] == "time_limit"
        assert leased(daemon) == 0
    assert holder.poll() is None


def test_its_time_can_be_extended(daemon: Daemon, holder: subprocess.Popen[bytes]) -> None:
    job = hold(daemon, holder.pid, time_limit=3600)
    when_in(daemon, job, "active")
    assert client(daemon).extend(job, 3600).claim.time_limit == 7200
    client(daemon).extend(job, -7199)
    assert when_in(daemon, job, "ended").outcome == "time_limit"


def test_without_a_holder_and_without_a_limit_it_is_refused(daemon: Daemon) -> None:
    with pytest.raises(BadValue) as refused:
        hold(daemon, None)
    assert refused.value.hint


@pytest.mark.parametrize("pid", [0, -1, 1 << 30])
def test_a_pid_that_no_process_can_have_is_refused(daemon: Daemon, pid: int) -> None:
    with pytest.raises(BadValue):
        hold(daemon, pid)


def test_a_process_that_has_ended_cannot_hold(
    daemon: Daemon, holder: subprocess.Popen[bytes]
) -> None:
    holder.kill()
    # Not waited for: a zombie holds nothing either.
    stat = Path(f"/proc/{holder.pid}/stat")
    wait_for("it is a zombie", lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    with pytest.raises(BadValue):
        hold(daemon, holder.pid)
    holder.wait()
    with pytest.raises(BadValue):
        hold(daemon, holder.pid)


def test_a_holder_that_lives_keeps_its_lease_over_a_restart_and_loses_it_afterwards(
    daemon: Daemon, holder: subprocess.Popen[bytes]
) -> None:
    job, timed = hold(daemon, holder.pid), hold(daemon, None, time_limit=3600)
    for each in (job, timed):
        when_in(daemon, each, "active")
    daemon.kill()
    daemon.start()
    shown = client(daemon).job(job)
    assert (shown.state, shown.pid) == ("active", holder.pid)
    assert leased(daemon) == 2 * G
    assert [event.kind for event in shown.events].count("worker_started") == 1
    end(holder)
    assert when_in(daemon, job, "ended").outcome == "released"
    assert client(daemon).job(timed).state == "active"
    client(daemon).cancel(timed)
    assert when_in(daemon, timed, "ended").outcome == "released"


def test_another_process_with_the_pid_of_the_holder_does_not_keep_the_lease(
    daemon: Daemon, holder: subprocess.Popen[bytes]
) -> None:
    job = hold(daemon, holder.pid)
    when_in(daemon, job, "active")
    daemon.kill()
    # As if the pid had been given to a process that began later.
    with closing(sqlite3.connect(daemon.state / "gpulease.db")) as connection, connection:
        connection.execute("UPDATE holders SET started = started - 1")
    daemon.start()
    assert when_in(daemon, job, "ended").outcome == "released"


def test_a_time_that_ran_out_while_the_daemon_was_away_is_over(daemon: Daemon) -> None:
    job = hold(daemon, None, time_limit=1)
    when_in(daemon, job, "active")
    daemon.kill()
    daemon.start()
    assert when_in(daemon, job, "ended").outcome == "time_limit"


def ask(daemon: Daemon, pid: int, memory: int) -> tuple[subprocess.Popen[bytes], int]:
    """Have another process ask for a lease for `pid`; return it and the id."""
    asker = subprocess.Popen(
        [sys.executable, "-c", _ASK, str(daemon.socket), str(pid), str(memory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert asker.stdout is not None
    return asker, int(asker.stdout.readline())


def finish(asker: subprocess.Popen[bytes]) -> None:
    asker.kill()
    asker.communicate()


def test_a_lease_that_waits_is_dropped_with_the_process_that_asked_for_it(
    daemon: Daemon, holder: subprocess.Popen[bytes]
) -> None:
    blockers = [hold(daemon, os.getpid(), memory=8 * G) for _ in range(2)]
    when_in(daemon, blockers[1], "active")
    asker, job = ask(daemon, holder.pid, G)
    assert client(daemon).job(job).state == "queued"
    finish(asker)
    ended = when_in(daemon, job, "ended")
    assert ended.outcome == "cancelled"
    assert ended.reason


def test_also_when_it_ended_while_the_daemon_was_away(
    daemon: Daemon, holder: subprocess.Popen[bytes]
) -> None:
    blockers = [hold(daemon, os.getpid(), memory=8 * G) for _ in range(2)]
    when_in(daemon, blockers[1], "active")
    (gone, dropped), (there, kept) = ask(daemon, holder.pid, G), ask(daemon, holder.pid, G)
    daemon.kill()
    finish(gone)
    daemon.start()
    assert client(daemon).job(dropped).outcome == "cancelled"
    assert client(daemon).job(kept).state == "queued"
    finish(there)
    assert when_in(daemon, kept, "ended").outcome == "cancelled"


def test_once_it_is_granted_the_process_that_asked_may_go(
    daemon: Daemon, holder: subprocess.Popen[bytes]
) -> None:
    asker, job = ask(daemon, holder.pid, G)
    when_in(daemon, job, "active")
    finish(asker)
    # Whatever the daemon hears of the end of a process, it hears in order.
    other = subprocess.Popen(["sleep", "1000"])
    second = hold(daemon, other.pid)
    when_in(daemon, second, "active")
    end(other)
    when_in(daemon, second, "ended")
    assert client(daemon).job(job).state == "active"


def test_its_environment_is_what_a_job_would_find_and_only_while_it_is_held(
    daemon: Daemon, holder: subprocess.Popen[bytes]
) -> None:
    blockers = [hold(daemon, os.getpid(), memory=8 * G) for _ in range(2)]
    when_in(daemon, blockers[1], "active")
    mine = {**variables(), "CAF\xc3\x89": "caf\xe9", "XLA_CLIENT_MEM_FRACTION": "0.5"}
    asked = HoldRequest(mine, holder.pid, ClaimRequest(memory=2 * G))
    job = client(daemon).hold(asked).id
    with pytest.raises(WrongState):
        client(daemon).environment(job)
    client(daemon).cancel(blockers[0])
    shown = when_in(daemon, job, "active")
    told = client(daemon).environment(job)
    assert told.set["GPULEASE_JOB"] == str(job)
    assert told.set["GPULEASE_MEMORY"] == str(2 * G)
    assert told.set["CUDA_VISIBLE_DEVICES"] == shown.leases[0].gpu
    assert told.unset == ["XLA_CLIENT_MEM_FRACTION"]
    assert not told.set.keys() & {"PATH", "CAF\xc3\x89"}, "what stays as it is is not told"
    # Put into effect by hand, it is what a job with the same environment gets.
    seen = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ['GPULEASE_MEMORY'])"],
        env={**os.environ, **{from_wire(k): from_wire(v) for k, v in told.set.items()}},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert seen.stdout == f"{2 * G}\n"
    client(daemon).cancel(job)
    when_in(daemon, job, "ended")
    with pytest.raises(WrongState):
        client(daemon).environment(job)


def test_what_runs_below_the_holder_or_in_its_environment_is_counted_to_the_lease(
    daemon: Daemon,
) -> None:
    shell = subprocess.Popen(
        ["sh", "-c", "read gpu; CUDA_VISIBLE_DEVICES=$gpu sleep 1000 & echo $!; wait"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    job = hold(daemon, shell.pid)
    when_in(daemon, job, "active")
    told = client(daemon).environment(job)
    outside = subprocess.Popen(["sleep", "1000"], env={**os.environ, **told.set})
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(told.set["CUDA_VISIBLE_DEVICES"].encode() + b"\n")
    shell.stdin.flush()
    below = int(shell.stdout.readline())
    try:

        def seen() -> dict[int, int | None]:
            gpus = client(daemon).status().gpus
            return {each.pid: each.job for gpu in gpus for each in gpu.processes}

        ours = {below: job, outside.pid: job}
        wait_for("both are counted", lambda: seen().items() >= ours.items())
        client(daemon).cancel(job)
        when_in(daemon, job, "ended")
        strangers = dict.fromkeys(ours)
        wait_for("both count as unmanaged", lambda: seen().items() >= strangers.items())
    finally:
        for pid in (below, outside.pid):
            os.kill(pid, 9)
        outside.wait()
        shell.communicate()
