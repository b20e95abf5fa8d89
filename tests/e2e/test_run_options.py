"""Options for frameworks and defaults of the user, from the command to what a job finds."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon
from goldens import mentions

G = 1024**3
GPULEASE = shlex.join([sys.executable, "-m", "gpulease.cli"])
HOOK = "import json, os; print(json.dumps(json.loads(os.environ['GPULEASE_HOOK'])['options']))"
TELL = [sys.executable, "-c", HOOK]


@pytest.fixture
def daemon(shared: Daemon) -> Daemon:
    return shared


def options(daemon: Daemon, *line: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(daemon.run("run", *line, **more).stdout)
    return found


def nested(daemon: Daemon, *given: str) -> list[str]:
    """Return what a shell script in a job of --split 1G,2G writes on both streams."""
    script = f"{GPULEASE} run {shlex.join(given)} -- {shlex.join(TELL)} 2>&1"
    variables = os.environ | {"GPULEASE_SOCKET": str(daemon.socket)}
    line = ("run", "--mem", "4G", "--split", "1G,2G", "--", "sh", "-c", script)
    return list(daemon.run(*line, env=variables, check=False).stdout.splitlines())


def test_options_of_frameworks_reach_the_hooks_and_the_variables(daemon: Daemon) -> None:
    given = ("--mem", "4G", "--split", "1G,2G", "--deterministic", "--omp-threads", "3")

    found = options(daemon, *given, "--", *TELL)
    variables = daemon.run("run", *given, "--", "sh", "-c", "echo $OMP_NUM_THREADS").stdout

    assert (found["split"], found["split_sizes"]) == (2, [G, 2 * G])
    assert found["deterministic"] is True
    assert variables == "3\n"


def test_parts_of_a_nested_lease_are_those_of_the_job_or_its_own(daemon: Daemon) -> None:
    inherited = json.loads(nested(daemon)[-1])
    equal = json.loads(nested(daemon, "--split", "3")[-1])
    refused = nested(daemon, "--mem", "2G", "--split", "2G,1G")

    assert inherited["split_sizes"] == [G, 2 * G]
    assert (equal["split"], equal["split_sizes"]) == (3, [])
    assert mentions("\n".join(refused), "2G,1G", "3G")


@pytest.mark.parametrize("way", ["on", "off"])
def test_a_script_has_options_of_its_own(daemon: Daemon, tmp_path: Path, way: str) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n# gpulease: --mem 2G --time 1h\n\necho $GPULEASE_MEMORY\n")
    script.chmod(0o755)
    variables = os.environ | {"GPULEASE_QUICK_PARSER": way}
    for line, memory in (((), 2 * G), (("--mem", "1G"), G)):
        done = daemon.run("run", *line, str(script), env=variables)
        assert done.stdout == f"{memory}\n"
    limits = [job["claim"]["time_limit"] for job in daemon.jobs()]
    assert limits[-2:] == [3600, 3600]


def test_defaults_are_for_jobs_and_not_for_commands_within_one(
    daemon: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "gpulease").mkdir()
    (tmp_path / "gpulease" / "config.toml").write_text("[run]\ngrowth = true\nmem = '1G'\n")
    variables = os.environ | {
        "XDG_CONFIG_HOME": str(tmp_path),
        "GPULEASE_RUN_OPTIONS": "--mem 2G --time 1h",
        "GPULEASE_SOCKET": str(daemon.socket),
    }
    script = f"echo $GPULEASE_MEMORY; {GPULEASE} run -- {shlex.join(TELL)}"

    output = daemon.run("run", "--no-growth", "sh", "-c", script, env=variables).stdout

    memory, within = output.splitlines()
    assert memory == str(2 * G)
    # Within the job the time limit would be refused, and growth is off as in the job.
    assert json.loads(within)["growth"] is False
