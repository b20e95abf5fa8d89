"""The memory of jobs and GPUs over time, on the daemon as it runs."""

from collections.abc import Callable

import pytest

from daemon_rig import Daemon, wait_for
from gpulease.errors import BadValue, NoSuchGpu, NoSuchJob
from nvml_stand_in import Card

from .conftest import OnCards

G, M = 1024**3, 1024**2


def known(values: list[int | None]) -> list[int]:
    return [each for each in values if each is not None]


def test_what_the_driver_reports_is_in_the_history_of_a_gpu_and_of_its_job(
    on_cards: OnCards,
) -> None:
    card = Card(total=8 * G, utilization=97, temperature=61, power=287.4, power_limit=400)
    daemon, stand_in = on_cards(card, Card(total=8 * G))
    job = daemon.submit("--mem", "1G", "--gpu", "0", "--", "sleep", "600")
    pid = daemon.wait_until(job, "active")["pid"]
    stand_in.change(0, used=512 * M, processes=[(pid, 512 * M)])
    client = daemon.client

    series = wait_for(
        "it is sampled", lambda: (it := client.job_memory(job).gpus[0]).used[-1] and it
    )
    assert (series.used[-1], series.utilization[-1], series.leased) == (512 * M, 97, G)
    assert client.job_memory(job, since=3600).gpus[0].used[-1] == 512 * M
    assert known(client.job_memory(job, since=7200, until=3600).gpus[0].used) == []
    with pytest.raises(BadValue):
        client.job_memory(job, since=60, until=60)
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
