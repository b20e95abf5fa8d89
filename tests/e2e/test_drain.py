"""Draining GPUs by hand: new leases go elsewhere, what runs goes on, and it is remembered."""

import json
from collections.abc import Callable

from .conftest import Daemon, wait_for


def gpu(daemon: Daemon, index: int) -> dict[str, object]:
    found: dict[str, object] = daemon.status()["gpus"][index]
    return found


def test_a_drained_gpu_takes_no_lease_over_restarts_until_it_is_resumed(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon: Daemon = make_daemon(settings={"grace": "1s"}).start()
    first = daemon.submit("--mem", "6G", "--", "sleep", "600")
    lease = daemon.wait_until(first, "active")["leases"][0]
    there = next(each["index"] for each in daemon.status()["gpus"] if each["uuid"] == lease["gpu"])

    said = daemon.run("drain", lease["gpu"][:12], "--why", "fan").stdout
    assert said == f"GPU {there} is drained by root: fan; job {first} there goes on\n"
    again = daemon.run("drain", str(there), "--why", "another reason").stdout
    assert again == (
        f"GPU {there} was drained before: drained by root: fan; that is still the reason: "
        f"to give another, gpulease resume {there}, and drain it anew\n"
    )
    assert gpu(daemon, there)["state"] == "drained"
    assert daemon.status()["gpus"][there]["memory"]["headroom"] == 0, "nothing is free to lease"
    assert "drained by root: fan" in daemon.run("status").stdout

    elsewhere = daemon.submit("--mem", "1G", "--", "sleep", "600")
    assert daemon.wait_until(elsewhere, "active")["leases"][0]["gpu"] != lease["gpu"]
    both = daemon.submit("--mem", "1G", "--gpus", "2", "--", "true")
    wait_for(
        "the reason is told",
        lambda: f"GPU {there}: drained by root: fan" in (daemon.job(both)["reason"] or ""),
    )

    daemon.kill()
    daemon.start()
    assert daemon.job(first)["state"] == "active"
    assert gpu(daemon, there)["detail"] == "drained by root: fan"
    # It is root's daemon here: not all who ask may.
    mend = f"gpulease resume {there} (by an admin or root)"
    assert mend in daemon.run("doctor", check=False).stdout
    assert daemon.run("resume", str(there)).stdout == f"GPU {there} takes leases again\n"
    assert daemon.wait_until(both, "ended")["exit_status"] == 0
    assert daemon.run("resume", str(there)).stdout == f"GPU {there} was not drained\n"
    assert gpu(daemon, there)["state"] == "available"


def test_a_gpu_that_is_not_there_is_refused_with_the_names_of_those_that_are(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon: Daemon = make_daemon().start()
    refused = daemon.run("drain", "7", "1", check=False)
    assert refused.returncode == 125
    assert "cannot find a GPU '7'" in refused.stderr
    assert "hint: name it by its index (0, 1) or by its UUID" in refused.stderr
    assert refused.stdout == "", "nothing is done before all names are known"
    assert gpu(daemon, 1)["state"] == "available"
    drained = daemon.run("drain", daemon.status()["gpus"][1]["uuid"].upper()[:12])
    assert drained.stdout == "GPU 1 is drained by root; nothing runs there\n"
    unclear = daemon.run("resume", "GPU-", check=False)
    assert unclear.returncode == 125
    assert "cannot tell which GPU 'GPU-' is" in unclear.stderr
    assert "spaces between them: 0 1" in daemon.run("drain", "1,0", check=False).stderr
    again = daemon.run("drain", "1", "--why", "another fan").stdout
    assert again.startswith("GPU 1 was drained before: drained by root; ")
    assert "gpulease resume 1" in again
    too_long = daemon.run("drain", "0", "--why", "x" * 300, check=False)
    assert "at most 200 printable characters" in too_long.stderr
    states = [each["state"] for each in json.loads(daemon.run("status", "--json").stdout)["gpus"]]
    assert states == ["available", "drained"]
