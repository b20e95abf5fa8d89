"""The scripts in examples/idioms/tensorflow*, unedited: what they hand to TensorFlow, and a run.

With faked GPUs, tensorflow_zygote.py reads the configuration where it leaves Python. What is placed
on a GPU that is not there fails in C++ after that, unless the script allows soft placement. On
simulated GPUs each script runs to its end in a real job.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from daemon_rig import Daemon, daemons
from frameworks.environments import versions
from frameworks.tensorflow_leases import HERE, Outcomes, handed, interpreter
from frameworks.tensorflow_scenarios import BOTH, FIRST, POOL, SECOND

pytestmark = pytest.mark.tensorflow

IDIOMS = Path(__file__).parents[2] / "examples" / "idioms"
THREADS = {"inter": 2, "intra": 4}
NO_SUCH_GPU = "Cannot assign a device for operation"


class Handed(NamedTuple):
    """Parts of the last configuration that reaches C++, and what fails where no GPU is."""

    sent: dict[str, Any]
    error: str | None = None


TENSORFLOW_1 = {
    "control_dependencies": Handed(BOTH | {"growth": True}),
    "device_function": Handed(BOTH | {"soft": True, "log": True}),
    "estimator_mirrored": Handed(BOTH | {"growth": True, "soft": True}),
    "keras_session": Handed(BOTH | {"growth": True}),
    "memory_fraction": Handed(BOTH | {"growth": False}),
    "second_gpu": Handed(BOTH | {"soft": False}, NO_SUCH_GPU),
    "session_options": Handed(FIRST | THREADS | {"growth": True, "soft": True, "log": True}),
    "towers": Handed(BOTH | {"log": True}),
}
TENSORFLOW_2 = {
    "all_logical_gpus": Handed(BOTH | {"log": True}),
    "compat_session": Handed(SECOND | THREADS | {"growth": True, "soft": True, "log": True}),
    "local_devices": Handed(BOTH),
    "memory_growth": Handed(BOTH | {"growth": True}),
    "mirrored": Handed(BOTH | {"growth": False}),
    "one_logical_gpu": Handed(BOTH | {"limits": [[1024], [POOL]]}),
    "one_visible_gpu": Handed(FIRST),
    "placement": Handed(BOTH | THREADS | {"soft": True, "log": True}),
    "two_logical_gpus": Handed(BOTH | {"limits": [[POOL // 2] * 2, [POOL]]}),
}


@cache
def outcomes(version: str, folder: str) -> Outcomes:
    scripts = sorted((IDIOMS / folder).glob("*.py"))
    return handed(version, {script.stem: (script.read_text(), "plain") for script in scripts})


def check(version: str, folder: str, name: str, expected: Handed) -> None:
    outcome = outcomes(version, folder).of[name]

    last = outcome["sent"][-1]
    assert {part: last[part] for part in expected.sent} == expected.sent
    for each in outcome["sent"]:
        assert each["fraction"] == 0
        assert all(sum(limits) <= POOL for limits in each["limits"])
    assert (outcome["error"] is None) == (expected.error is None)
    assert (expected.error or "") in (outcome["error"] or "")


@pytest.mark.parametrize("name", TENSORFLOW_1)
@pytest.mark.parametrize("version", versions("1.13", "1.15"))
def test_an_idiom_of_tensorflow_1_is_handed_the_lease(name: str, version: str) -> None:
    check(version, "tensorflow1", name, TENSORFLOW_1[name])


@pytest.mark.parametrize("name", TENSORFLOW_2)
@pytest.mark.parametrize("version", versions("2.4", "2.12", HERE))
def test_an_idiom_of_tensorflow_2_is_handed_the_lease(name: str, version: str) -> None:
    check(version, "tensorflow2", name, TENSORFLOW_2[name])


def test_every_idiom_has_a_test() -> None:
    folders = {"tensorflow1": TENSORFLOW_1, "tensorflow2": TENSORFLOW_2}
    for folder, rows in folders.items():
        assert {script.stem for script in (IDIOMS / folder).glob("*.py")} == set(rows)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemons(tmp_path_factory.mktemp("idioms")) as make:
        yield make().start()


IN_A_JOB = {"keras_session", "session_options", "towers", "compat_session", "mirrored", "placement"}
"""Those that `make test-slow` runs."""


@pytest.mark.parametrize(
    ("version", "script"),
    [
        pytest.param(
            version,
            f"{folder}/{name}",
            marks=[] if name in IN_A_JOB else pytest.mark.more_versions,
        )
        for version, folder, scripts in (
            ("1.13", "tensorflow1", TENSORFLOW_1),
            (HERE, "tensorflow2", TENSORFLOW_2),
        )
        for name in scripts
    ],
)
def test_an_idiom_runs_in_a_job_on_simulated_gpus(
    version: str, script: str, daemon: Daemon
) -> None:
    lease = ["--gpus", "2", "--mem", "4G", "--strict"]
    command = [interpreter(version), str(IDIOMS / f"{script}.py")]

    job = daemon.run("run", *lease, "--", *command, timeout=240)

    assert job.stdout
    assert "gpulease: " not in job.stderr
    hooks = daemon.job(max(each["id"] for each in daemon.jobs()))["hooks"]
    assert {(hook["framework"], hook["state"]) for hook in hooks} == {("tensorflow", "limited")}
