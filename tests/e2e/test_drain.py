"""Draining GPUs by hand: new leases go elsewhere, what runs goes on, and it is remembered."""

from collections.abc import Callable

from daemon_rig import Daemon, wait_for
from goldens import mentions


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
    assert mentions(said, f"GPU {there} ", "root", "fan", f"job {first} ")
    again = daemon.run("drain", str(there), "--why", "another reason").stdout
    assert mentions(again, f"GPU {there} ", "root", "fan", f"gpulease resume {there}")
    assert "another reason" not in again
    assert gpu(daemon, there)["state"] == "drained"
    assert daemon.status()["gpus"][there]["memory"]["headroom"] == 0, "nothing is free to lease"
    assert mentions(daemon.run("status").stdout, "root", "fan")

    elsewhere = daemon.submit("--mem", "1G", "--", "sleep", "600")
    assert daemon.wait_until(elsewhere, "active")["leases"][0]["gpu"] != lease["gpu"]
    both = daemon.submit("--mem", "1G", "--gpus", "2", "--", "true")
    wait_for(
        "the reason is told",
        lambda: mentions(daemon.job(both)["reason"], f"GPU {there}", "root", "fan"),
    )

    daemon.kill()
    daemon.start()
    assert daemon.job(first)["state"] == "active"
    assert mentions(str(gpu(daemon, there)["detail"]), "root", "fan")
    # It is root's daemon here: not all who ask may.
    doctor = daemon.run("doctor", check=False).stdout
    assert mentions(doctor.partition(f"gpulease resume {there}")[2].partition("\n")[0], "root")
    resumed = daemon.run("resume", str(there)).stdout
    assert f"GPU {there} " in resumed
    assert daemon.wait_until(both, "ended")["exit_status"] == 0
    assert daemon.run("resume", str(there)).stdout != resumed
    assert gpu(daemon, there)["state"] == "available"


def test_a_gpu_that_is_not_there_is_refused_with_the_names_of_those_that_are(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon: Daemon = make_daemon().start()
    refused = daemon.run("drain", "7", "1", check=False)
    assert refused.returncode == 125
    assert mentions(refused.stderr, "'7'", "hint: ", "0, 1", "UUID")
    assert refused.stdout == "", "nothing is done before all names are known"
    assert gpu(daemon, 1)["state"] == "available"
    drained = daemon.run("drain", daemon.status()["gpus"][1]["uuid"].upper()[:12])
    assert mentions(drained.stdout, "GPU 1 ", "root")
    unclear = daemon.run("resume", "GPU-", check=False)
    assert unclear.returncode == 125
    assert "'GPU-'" in unclear.stderr
    assert "0 1" in daemon.run("drain", "1,0", check=False).stderr
    again = daemon.run("drain", "1", "--why", "another fan").stdout
    assert mentions(again, "GPU 1 ", "root", "gpulease resume 1")
    too_long = daemon.run("drain", "0", "--why", "x" * 300, check=False)
    assert "200" in too_long.stderr
    states = [each["state"] for each in daemon.status()["gpus"]]
    assert states == ["available", "drained"]
