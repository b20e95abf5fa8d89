"""The memory of jobs and GPUs over time, on the daemon as it runs."""

import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for
from gpulease.errors import BadValue, NoSuchGpu, NoSuchJob
from nvml_stand_in import Card, StandIn

G, M = 1024**3, 1024**2
HUNGRY = Path(__file__).with_name("hungry.py")
ON_DISK_WITHIN_S = 60


def known(values: list[int | None]) -> list[int]:
    return [each for each in values if each is not None]


def test_the_growth_of_a_job_is_seen_and_survives_a_kill_of_the_daemon(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon().start()
    size = tmp_path / "size"
    size.write_text("100")
    job = daemon.submit("--mem", "1G", "--", sys.executable, str(HUNGRY), str(size))

    def used() -> list[int]:
        return known(daemon.client.job_memory(job).gpus[0].used)

    daemon.wait_until(job, "active")
    wait_for("it has a point", lambda: used()[-1:] > [100 * M])
    # What it has next belongs to a later point.
    wait_for("it has a second one", lambda: len(used()) > 1)
    size.write_text("300")
    grown = wait_for("it has grown", lambda: (it := used())[-1] > 300 * M and it)
    assert grown == sorted(grown)
    assert grown[0] < 200 * M < grown[-1] < 400 * M

    wait_for("it is on disk", lambda: spans_on_disk(daemon) >= 2, ON_DISK_WITHIN_S)
    daemon.kill()
    daemon.start()
    again = used()
    assert again[: len(grown) - 1] == grown[:-1]
    size.write_text("10")
    wait_for("it continues", lambda: used()[-1] < 100 * M)

    gpu = daemon.job(job)["leases"][0]["gpu"]
    history = daemon.client.gpu_history(gpu, since=600, points=1000)
    assert max(known(history.used)) > 300 * M
    assert max(known(history.leased)) == G
    [owner] = history.owners
    assert (owner.user, max(known(owner.used)) > 300 * M) == (daemon.job(job)["user"], True)


def spans_on_disk(daemon: Daemon) -> int:
    with closing(sqlite3.connect(daemon.state / "gpulease.db")) as connection:
        found: int = connection.execute("SELECT count(*) FROM job_memory").fetchone()[0]
        return found


def test_what_the_driver_reports_is_in_the_history_of_a_gpu_and_of_its_job(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    card = Card(total=8 * G, utilization=97, temperature=61, power=287.4, power_limit=400)
    stand_in = StandIn(tmp_path, gpus=[card, Card(total=8 * G)])
    daemon = make_daemon(simulate=None, environment=stand_in.environment()).start()
    job = daemon.submit("--mem", "1G", "--gpu", "0", "--", "sleep", "600")
    pid = daemon.wait_until(job, "active")["pid"]
    stand_in.change(0, used=512 * M, processes=[(pid, 512 * M)])
    client = daemon.client

    series = wait_for(
        "it is sampled", lambda: (it := client.job_memory(job).gpus[0]).used[-1] and it
    )
    assert (series.used[-1], series.utilization[-1], series.leased) == (512 * M, 97, G)
    history = client.gpu_history("0", since=30)
    assert (history.total, history.label) == (8 * G, "0")
    last = {name: getattr(history, name)[-1] for name in ("used", "leased", "unmanaged")}
    assert last == {"used": 512 * M, "leased": G, "unmanaged": 0}
    assert known(history.temperature)[-1] == 61
    assert known(history.utilization)[-1] == 97
    assert known(history.power)[-1] == 287
    first, second = daemon.status()["gpus"]
    assert (first["power"], first["power_limit"]) == (287.4, 400.0)
    assert (second["power"], second["power_limit"]) == (None, None)


def test_a_range_that_makes_no_sense_is_refused(make_daemon: Callable[..., Daemon]) -> None:
    client = make_daemon().start().client
    for wrong in ({"since": 10, "until": 10}, {"points": 1}, {"points": 1001}, {"since": 0}):
        with pytest.raises(BadValue):
            client.gpu_history("0", **wrong)  # type: ignore[arg-type]
    with pytest.raises(NoSuchGpu):
        client.gpu_history("7")
    with pytest.raises(NoSuchJob):
        client.job_memory(7)
    assert len(client.gpu_history("1", since=365 * 86400, points=1000).used) <= 1000
