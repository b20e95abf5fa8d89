"""A lease is shown as limited by its framework once its hook reports that, and never if it failed.

TensorFlow is the real one in its CPU build, with one GPU faked in its list of devices; the driver
is a stand-in with NVML's ABI.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions
from nvml_stand_in import Card, StandIn

from .test_overuse import notices, over_for_s
from .users import OTHER, STRANGER, call, daemon_for_all, job, needs_root

G = 1024**3

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow"),
]

USE = """
import os, sys, time
import tensorflow as tf
from tensorflow.python.eager import context
names = [b"/physical_device:CPU:0", b"/physical_device:GPU:0"]
context.pywrap_tfe.TF_ListPhysicalDevices = lambda: names
with tf.device("CPU"):
    tf.constant(1) + tf.constant(1)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
RENAME = """
import importlib.machinery, sys
class Renaming:
    def find_spec(self, name, path=None, target=None):
        if name != "tensorflow.python.eager.context":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        original = spec.loader.exec_module
        def exec_module(module):
            original(module)
            config = module.Context.__dict__["config"]
            del module.Context.config
            module.Context.__getattr__ = lambda self, name: (
                config.fget(self) if name == "config" else object.__getattribute__(self, name)
            )
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Renaming())
"""
"""A version of TensorFlow in which a private name that the hook replaces has another name."""


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Daemon:
    stand_in = StandIn(tmp_path, gpus=[Card(total=80 * G)])
    made: Daemon = make_daemon(
        simulate=None, environment=stand_in.environment(), settings={"grace": "1s"}
    )
    made.start()
    rungs = {each["rung"] for each in made.status()["enforcement"] if each["available"]}
    if "framework" not in rungs:
        pytest.skip("not every user can read the hooks where this checkout is")
    return made


def submit(daemon: Daemon, source: str, done: Path, *options: str) -> int:
    command = [sys.executable, "-c", source, str(done)]
    return daemon.submit("--mem", "4G", *options, "--", "env", "TF_CPP_MIN_LOG_LEVEL=3", *command)


def levels(shown: dict[str, Any]) -> list[str]:
    return list(shown["leases"][0]["enforced_by"])


def test_a_lease_is_limited_by_its_framework_from_the_first_report_on(
    daemon: Daemon, tmp_path: Path
) -> None:
    number = submit(daemon, USE, tmp_path / "done")
    before = daemon.wait_until(number, "active")
    if before["hook"] == "none":
        assert levels(before) == ["watch"]

    after = wait_for(
        "its hook has reported",
        lambda: shown if (shown := daemon.job(number))["first_use_at"] else None,
    )

    assert levels(after) == ["framework", "watch"]
    (hook,) = after["hooks"]
    assert (hook["framework"], hook["state"]) == ("tensorflow", "limited")
    assert hook["limits"] == [{"gpu": after["leases"][0]["gpu"], "limit": 4 * G - 700 * 1024**2}]
    assert after["first_use_at"] >= after["started_at"]
    page = daemon.run("show", str(number)).stdout
    assert mentions(page, "tensorflow 2.", "limited to 3.3G on GPU 0")

    daemon.kill()
    daemon.start()
    assert levels(daemon.job(number)) == ["framework", "watch"]
    (tmp_path / "done").touch()
    assert levels(daemon.wait_until(number, "ended")) == ["framework", "watch"]


def test_what_a_framework_needs_beside_its_pool_stops_no_job_and_is_reserved_for_the_next(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    stand_in = StandIn(tmp_path, gpus=[Card(total=80 * G)])
    settings = {"grace": "1s", "overuse_grace": "1s"}
    daemon = make_daemon(simulate=None, environment=stand_in.environment(), settings=settings)
    daemon.start()
    number = submit(daemon, USE, tmp_path / "done")
    pid = daemon.wait_until(number, "active")["pid"]
    reported(daemon, number)
    pool = 4 * G - 700 * 1024**2
    needed = pool + 1869 * 1024**2

    stand_in.change(0, used=needed, processes=[(pid, needed)])
    notice = wait_for("its owner is told", lambda: notices(daemon, number))[0]
    assert mentions(notice, "5.1G", "1.1G more", "does not stop", "--mem 5.5G"), notice
    wait_for("graces pass", lambda: over_for_s(daemon, number) > 2)
    shown = daemon.job(number)
    assert (shown["state"], shown["leases"][0]["stops_at"]) == ("active", None)
    memory = daemon.status()["gpus"][0]["memory"]
    assert memory["headroom"] + needed <= 80 * G, "it counts"

    daemon.kill()
    daemon.start()
    wait_for("it is seen again", lambda: over_for_s(daemon, number) > 2)
    assert daemon.job(number)["state"] == "active"
    (tmp_path / "done").touch()
    assert daemon.wait_until(number, "ended")["outcome"] == "exited"
    stand_in.change(0, used=0, processes=[])

    (tmp_path / "done").unlink()
    second = submit(daemon, USE, tmp_path / "done")
    pid = daemon.wait_until(second, "active")["pid"]
    (hook,) = reported(daemon, second)["hooks"]
    reserved = 1920 * 1024**2
    assert 4 * G - hook["limits"][0]["limit"] == reserved

    too_much = 4 * G - reserved + 5 * G
    stand_in.change(0, used=too_much, processes=[(pid, too_much)])
    end = daemon.wait_until(second, "ended")
    assert end["outcome"] == "over_lease", "any amount is not overhead"


def reported(daemon: Daemon, number: int) -> dict[str, Any]:
    return wait_for(
        "its hook has reported",
        lambda: shown if (shown := daemon.job(number))["first_use_at"] else None,
    )


def test_a_lease_of_a_framework_with_a_missing_name_is_never_shown_as_limited(
    daemon: Daemon, tmp_path: Path
) -> None:
    number = submit(daemon, RENAME + USE, tmp_path / "done")

    def failed() -> dict[str, Any] | None:
        shown = daemon.job(number)
        assert not shown["leases"] or "framework" not in levels(shown)
        return shown if shown["hook"] == "failed" else None

    wait_for("its hook has failed", failed)

    def events() -> list[str]:
        return [each["kind"] for each in daemon.job(number)["events"]]

    wait_for("it is on record", lambda: events().count("hook_failed") == 1)
    assert mentions(daemon.run("show", str(number)).stdout, "not limited", "Context.config")
    assert mentions(daemon.run("status").stdout, "no framework limit")
    (row,) = json.loads(daemon.run("status", "--json").stdout)["jobs"]
    assert (row["hook"], levels(row)) == ("failed", ["watch"])

    daemon.kill()
    daemon.start()
    assert failed() is not None
    assert events().count("hook_failed") == 1
    (tmp_path / "done").touch()
    ended = daemon.wait_until(number, "ended")
    assert levels(ended) == ["watch"]
    assert "Context.config" in ended["hooks"][0]["why"]
    output = (daemon.state / "jobs" / str(number) / "stderr").read_text()
    assert output.count("is not limited to the lease") == 1


def test_a_report_that_no_daemon_takes_is_repeated_to_the_next_one(
    daemon: Daemon, tmp_path: Path
) -> None:
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '.go'): time.sleep(0.05)\n"
    number = submit(daemon, wait + RENAME + USE, tmp_path / "done")
    daemon.wait_until(number, "active")
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    (tmp_path / "done.go").touch()
    output = daemon.state / "jobs" / str(number) / "stderr"
    wait_for("the hook has failed", lambda: "is not limited" in output.read_text())
    daemon.kill()
    daemon.start()

    wait_for("the new daemon hears it", lambda: daemon.job(number)["hook"] == "failed")
    (tmp_path / "done").touch()


@needs_root
def test_a_report_of_another_user_about_a_job_is_refused() -> None:
    with daemon_for_all() as machine:
        number = call(machine, STRANGER, "POST", "/v1/jobs", job("sleep", "60"))[1]["id"]
        (lease,) = machine.wait_until(number, "active")["leases"]
        report = {
            "framework": "torch", "version": "1", "state": "failed", "why": "x",
            "gpus": [{"gpu": lease["gpu"], "limit": 1}],
        }  # fmt: skip

        assert call(machine, OTHER, "POST", f"/v1/jobs/{number}/usage", report)[0] == 403

        assert machine.job(number)["hooks"] == []


def test_a_framework_that_another_import_hook_brings_past_ours_is_found(
    daemon: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '9.9'\n")
    script = dedent(
        f"""
        import importlib.machinery, sys
        class First:
            def find_spec(self, name, path=None, target=None):
                return importlib.machinery.PathFinder.find_spec(name, [{str(tmp_path)!r}])
        sys.meta_path.insert(0, First())
        import torch
        """
    )
    numbers = [submit(daemon, script, tmp_path / "done", *strict) for strict in ((), ("--strict",))]

    ended = [daemon.wait_until(number, "ended") for number in numbers]

    assert [each["exit_status"] for each in ended] == [0, 97]
    for each in ended:
        (hook,) = each["hooks"]
        assert (hook["framework"], hook["version"], hook["state"]) == ("torch", "9.9", "failed")


def test_a_lease_in_a_running_process_is_limited_once_its_hook_reports(
    daemon: Daemon, tmp_path: Path
) -> None:
    source = "import gpulease\nlease = gpulease.lease('4G')\n" + USE
    command = [sys.executable, "-c", source, str(tmp_path / "done")]
    variables = os.environ | {"GPULEASE_SOCKET": str(daemon.socket), "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(command, env=variables)

    def limited() -> dict[str, Any] | None:
        jobs = daemon.jobs()
        return jobs[0] if jobs and jobs[0]["hook"] == "limited" else None

    # The watch does not stop holders.
    assert levels(wait_for("its hook has reported", limited)) == ["framework"]
    (tmp_path / "done").touch()
    assert process.wait(120) == 0
