"""MIG devices: leased like GPUs, one to a job; and GPUs that are listed and not leased."""

import json

from daemon_rig import wait_for
from goldens import mentions
from nvml_stand_in import Card, Part

from .conftest import OnCards

G = 1024**3
PARTS = (Part("MIG-aaaa-1", total=20 * G), Part("MIG-aaaa-2", total=10 * G))


def test_a_job_gets_one_mig_device_and_finds_its_uuid(
    on_cards: OnCards,
) -> None:
    daemon, _ = on_cards(Card(mig=True, parts=PARTS))
    shown = daemon.status()["gpus"]
    assert [(gpu["label"], gpu["state"]) for gpu in shown] == [
        ("0", "divided"),
        ("0:0", "available"),
        ("0:1", "available"),
    ]
    page = daemon.run("status").stdout
    assert "2 MIG devices" in page
    assert "0:1" in page
    for options, mig in (
        (["--mem", "8G"], "MIG-aaaa-2"),
        (["--mem", "12G"], "MIG-aaaa-1"),
        (["--mem", "8G", "--visible", "index"], "MIG-aaaa-2"),
    ):
        out = daemon.run("run", *options, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout
        assert out.strip() == mig
    refused = daemon.run("run", "--mem", "1G", "--gpus", "2", "--", "true", check=False)
    assert refused.returncode == 125
    assert "MIG" in refused.stderr
    assert "hint: " in refused.stderr
    too_large = daemon.run("run", "--mem", "30G", "--", "true", check=False)
    assert mentions(too_large.stderr, "30G", "20G")


def test_a_lease_of_a_mig_device_counts_there_and_outlasts_its_gpus_loss(
    on_cards: OnCards,
) -> None:
    daemon, stand_in = on_cards(Card(mig=True, parts=PARTS))
    job = daemon.submit("--mem", "8G", "--", "sleep", "600")
    pid = daemon.wait_until(job, "active")["pid"]
    used = Part("MIG-aaaa-2", total=10 * G, used=4 * G, processes=[(pid, 3 * G)])
    stand_in.change(0, parts=(PARTS[0], used))

    def memory() -> dict[str, int]:
        found: dict[str, int] = daemon.status()["gpus"][2]["memory"]
        return found

    wait_for("its use is seen", lambda: memory()["used"] == 4 * G)
    assert (memory()["committed"], memory()["unmanaged"], memory()["headroom"]) == (8 * G, G, G)
    assert daemon.job(job)["leases"][0]["used"] == 3 * G
    daemon.run("drain", "0", "--why", "repair")
    wait_for("its parts are drained", lambda: daemon.status()["gpus"][1]["state"] == "drained")
    daemon.run("resume", "0")
    stand_in.change(0, lost=True)
    wait_for("the loss is seen", lambda: daemon.status()["gpus"][2]["state"] == "lost")
    assert daemon.status()["gpus"][2]["memory"]["leased"] == 8 * G
    # Divided in another way while it was away.
    stand_in.change(0, lost=False, parts=PARTS[:1])
    wait_for("it is back", lambda: daemon.status()["gpus"][0]["state"] == "divided")
    gone = next(gpu for gpu in daemon.status()["gpus"] if gpu["uuid"] == "MIG-aaaa-2")
    assert (gone["state"], gone["memory"]["leased"]) == ("lost", 8 * G)


def test_doctor_tells_how_each_gpu_is_set_up_and_warns_of_what_cannot_be_shared(
    on_cards: OnCards,
) -> None:
    alone = Card(compute_mode=3, ecc=None)
    daemon, _ = on_cards(Card(mig=True, parts=PARTS), alone)

    def found() -> dict[str, dict[str, str]] | None:
        reply = json.loads(daemon.run("doctor", "--json", check=False).stdout)
        checks = {check["name"]: check for check in reply["checks"]}
        return checks if "GPU 1 modes" in checks else None

    checks = wait_for("the modes are known", found)
    assert "NVML 13.580" in checks["driver"]["message"]
    assert mentions(checks["GPU 0 modes"]["message"], "MIG on", "ECC on", "default")
    assert "MIG off, ECC unknown" in checks["GPU 1 modes"]["message"]
    assert checks["GPU 1 modes"]["state"] == "warning"
    assert checks["GPU 1 modes"]["mend"] == "nvidia-smi -i 1 -c DEFAULT"
    assert checks["GPU 1 health"]["state"] == "ok"
    assert "2 MIG devices" in checks["GPU 0"]["message"]
