"""GPUs in another order, one fewer, a driver that is replaced, hangs or talks nonsense."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from gpulease.wire.machine import GpuView
from nvml_stand_in import Card, Code, StandIn

from .asking import G, client, submit, when, when_in
from .conftest import OnCards

_NEWER = "590.44.01"


@pytest.fixture
def machine(on_cards: OnCards) -> tuple[Daemon, StandIn]:
    """Return a daemon on two GPUs of 8 and 16 GiB, which is running."""
    return on_cards(Card(total=8 * G), Card(total=16 * G), driver_deadline="1s")


def gpus(daemon: Daemon) -> dict[str, GpuView]:
    return {gpu.uuid: gpu for gpu in client(daemon).status().gpus}


def when_gpus(daemon: Daemon, what: str, true: Callable[[dict[str, GpuView]], Any]) -> None:
    wait_for(what, lambda: true(gpus(daemon)))


def test_a_lease_on_a_gpu_that_is_gone_is_kept_and_shown_and_who_waits_for_it_is_told(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    small, large = stand_in.gpus
    job = submit(daemon, "sleep", "600", memory=12 * G)
    when_in(daemon, job, "active")
    beside = submit(daemon, "sh", "-c", "exit 3", memory=15 * G)
    both = submit(daemon, "true", gpus=2, memory=6 * G)
    daemon.kill()
    stand_in.update(gpus=[small])
    daemon.start()
    lost = gpus(daemon)[large.uuid]
    assert (lost.state, lost.memory.leased) == ("lost", 12 * G)
    assert client(daemon).job(job).state == "active"
    told = when(daemon, beside, "it has a reason", lambda it: it.reason).refusals
    assert told and all(each.why for each in told)
    client(daemon).cancel(job)
    when_in(daemon, job, "ended")
    when(daemon, both, "it is told", lambda it: it.reason and "1" in it.reason)
    assert submit(daemon, "true") and daemon.log.count("Traceback") == 0
    daemon.kill()
    stand_in.update(gpus=[small, large])
    daemon.start()
    assert when_in(daemon, beside, "ended").exit_status == 3
    assert when_in(daemon, both, "ended").exit_status == 0


def test_a_driver_replaced_under_the_daemon_is_told_and_used_when_it_is_whole_again(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    running = submit(daemon, "sleep", "600")
    when_in(daemon, running, "active")
    stand_in.load(_NEWER)
    when_gpus(
        daemon, "the mismatch is told",
        lambda seen: all("mismatch" in (gpu.detail or "") for gpu in seen.values()),
    )  # fmt: skip
    waiting = submit(daemon, "sh", "-c", "exit 3")
    shown = when(daemon, waiting, "it has a reason", lambda it: it.reason)
    assert shown.state == "queued"
    assert "mismatch" in (shown.reason or "")
    checks = client(daemon).doctor().checks
    assert {check.state for check in checks if check.name.startswith("GPU")} == {"failure"}
    stand_in.install(_NEWER)
    assert when_in(daemon, waiting, "ended").exit_status == 3
    assert client(daemon).job(running).state == "active"
    assert client(daemon).status().driver == _NEWER


@pytest.mark.parametrize(
    "nonsense",
    [
        {"total": 2**63, "name": "\x1b[2J" + "x" * 60},
        {"used": 2**63, "reserved": 2**62},
    ],
)
def test_nonsense_of_one_gpu_stops_its_leases_and_those_of_no_other(
    nonsense: dict[str, Any], machine: tuple[Daemon, StandIn]
) -> None:
    daemon, stand_in = machine
    _, well = stand_in.gpus
    stand_in.change(0, processes=[(2**31 - 1, 2**62), (os.getpid(), 2**63)], **nonsense)
    for _ in range(2):
        job = submit(daemon, "sh", "-c", "exit 3", memory=9 * G)
        assert when_in(daemon, job, "ended").exit_status == 3
    seen = gpus(daemon)
    assert seen[well.uuid].state == "available"
    for gpu in seen.values():
        assert (gpu.memory.headroom or 0) <= 16 * G
    assert "\x1b" not in daemon.run("status").stdout
    wait_for("samples are written", lambda: client(daemon).status().gpus)
    assert "Traceback" not in daemon.log


def test_nvml_that_crashed_the_daemon_is_called_by_a_process_that_may_crash(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    daemon.kill()
    daemon.forked = False
    daemon.start()
    running = submit(daemon, "sleep", "600")
    when_in(daemon, running, "active")
    stand_in.update(faults={"nvmlDeviceGetMemoryInfo*": Code.CRASH})
    assert daemon.process is not None
    assert daemon.process.wait(120) == -signal.SIGSEGV

    # It crashes in the new process as well: the daemon stays, and its GPUs are unknown.
    daemon.start()
    assert "Fatal Python error: Segmentation fault" in daemon.log
    assert {gpu.state for gpu in gpus(daemon).values()} == {"unreadable"}
    assert client(daemon).job(running).state == "active"
    second = submit(daemon, "sh", "-c", "exit 3")
    said = [check.message for check in client(daemon).doctor().checks if check.name == "driver"]
    assert "crashed (SIGSEGV)" in said[0]

    stand_in.update(faults={})
    assert when_in(daemon, second, "ended").exit_status == 3
    stand_in.update(faults={"nvmlDeviceGetMemoryInfo*": Code.CRASH})
    when_gpus(
        daemon, "the crash is said",
        lambda seen: all("crashed (SIGSEGV)" in (gpu.detail or "") for gpu in seen.values()),
    )  # fmt: skip
    assert client(daemon).job(running).state == "active"
