"""Draining GPUs by hand: new leases go elsewhere, what runs goes on, and it is remembered."""

from collections.abc import Callable

from daemon_rig import Daemon
from goldens import mentions


def gpu(daemon: Daemon, index: int) -> dict[str, object]:
    found: dict[str, object] = daemon.status()["gpus"][index]
    return found


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
