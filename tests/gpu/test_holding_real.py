"""The watch and the ledger on a real GPU, by processes that take memory through CUDA itself."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for

from .allocator import Allocator, CannotAllocate, command

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.usefixtures("own_pids")]

G, M = 1 << 30, 1 << 20
SOON = {"overuse_grace": "3s", "grace": "3s", "driver_limits": "off"}
"""Without the driver's own limits, which would leave the watch nothing to do."""


def has_taken(daemon: Daemon, job: int, size: int) -> Callable[[], bool]:
    return lambda: f'"held": {size}}}' in daemon.run("logs", str(job)).stdout


def first_gpu(daemon: Daemon) -> dict[str, Any]:
    gpu: dict[str, Any] = daemon.status()["gpus"][0]
    return gpu


def test_a_job_over_its_lease_is_stopped_and_its_neighbour_stays(
    make_gpu_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_gpu_daemon(**SOON)
    neighbour = daemon.submit("--mem", "2G", "--", *command(512 * M))
    wait_for("the neighbour has its memory", has_taken(daemon, neighbour, 512 * M))
    grown = daemon.submit("--mem", "2G", "--", *command(4 * G))

    ended = daemon.wait_until(grown, "ended")

    assert (ended["outcome"], ended["exit_status"]) == ("over_lease", 124), ended
    assert ended["leases"][0]["gpu"] == daemon.job(neighbour)["leases"][0]["gpu"]
    assert f"job {grown} " in daemon.run("logs", str(grown)).stderr
    there = daemon.job(neighbour)
    assert there["state"] == "active"
    assert there["leases"][0]["used"] >= 512 * M
    wait_for("its memory is free again", lambda: first_gpu(daemon)["memory"]["used"] < 4 * G)


def test_a_process_outside_every_lease_is_seen_and_what_it_holds_is_not_leased(
    make_gpu_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_gpu_daemon()
    before = first_gpu(daemon)["memory"]["headroom"]
    with Allocator(2 * G) as stranger:

        def seen() -> dict[str, Any] | None:
            listed = first_gpu(daemon)["processes"]
            return next((each for each in listed if each["pid"] == stranger.pid), None)

        process = wait_for("the process is seen", seen)
        assert process["job"] is None
        assert process["user"] and process["started_at"]
        assert process["memory"] >= 2 * G
        assert "python" in process["name"]
        assert first_gpu(daemon)["memory"]["headroom"] <= before - 2 * G
    wait_for("it is free again", lambda: first_gpu(daemon)["memory"]["headroom"] > before - G)


def memory_of(daemon: Daemon, pid: int) -> int:
    listed = first_gpu(daemon)["processes"]
    return sum(each["memory"] or 0 for each in listed if each["pid"] == pid)


def test_a_process_that_holds_memory_gets_a_lease_for_it(
    make_gpu_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_gpu_daemon()
    with Allocator(2 * G) as stranger:
        daemon.run("adopt", str(stranger.pid))
        (job,) = daemon.client.jobs(everything=True).jobs
        held = sum(each.memory for each in job.leases)
        assert held >= 2 * G
        # The adoption reads the GPU; the status shows an earlier reading until the next one.
        wait_for("the status shows as much", lambda: memory_of(daemon, stranger.pid) == held)
        assert "framework" not in job.leases[0].enforced_by
        memory = first_gpu(daemon)["memory"]
        assert memory["leased"] == memory["committed"] == held
        assert memory["headroom"] == memory["allocatable"] - memory["unmanaged"] - held
    assert daemon.wait_until(job.id, "ended")["outcome"] == "released"


def test_memory_adds_up_while_a_process_holds_some(
    make_gpu_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_gpu_daemon()
    job = daemon.submit("--mem", "3G", "--", *command(G))
    wait_for("it has its memory", has_taken(daemon, job, G))
    wait_for("it is seen", lambda: (daemon.job(job)["leases"][0]["used"] or 0) >= G)

    memory = first_gpu(daemon)["memory"]

    assert memory["leased"] == memory["committed"] == 3 * G
    held = memory["allocatable"] - memory["headroom"] - memory["unmanaged"]
    assert held == 3 * G, memory


def test_the_proof_of_doctor_finds_what_holds(make_gpu_daemon: Callable[..., Daemon]) -> None:
    daemon = make_gpu_daemon(**SOON)

    done = daemon.run("doctor", "--prove", "--json", check=False, timeout=600.0)

    found = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert found["proof: watch"]["state"] == "ok", found


def test_too_much_for_the_gpu_is_refused_by_it_and_not_by_the_test(nvml: Any) -> None:
    total = nvml.read()[0].total
    with pytest.raises(CannotAllocate, match="OUT_OF_MEMORY"), Allocator(total + G):
        pass
