"""Containers in jobs: what reaches them, to which job they count, and how they end."""

import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gpulease
from container_rig import (
    OF_THE_HOST,
    PYTHON,
    Podman,
    cdi_spec,
    docker_in,
    podman_of,
    working_runtime,
)
from daemon_rig import Daemon, wait_for
from e2e.users import call, daemon_for_all, job
from goldens import mentions
from nvml_stand_in import Card, StandIn

pytestmark = pytest.mark.slow

G, M = 1024**3, 1024**2
HUNGRY = f"import time; held = bytearray({300 * M}); print('ready', flush=True); time.sleep(600)"
"""A program that ignores SIGTERM in a container, where it is process 1."""
SEEN = """
import fcntl, json, os, sys
from pathlib import Path
hooks = os.environ["PYTHONPATH"].split(":")[0]
try:
    Path(hooks, "x").touch()
except OSError as error:
    written = error.strerror
ledger = os.open(json.loads(os.environ["GPULEASE_HOOK"])["ledger"], os.O_RDWR | os.O_NONBLOCK)
fcntl.lockf(ledger, fcntl.LOCK_EX, 1 << 30)
finders = [type(each).__name__ for each in sys.meta_path]
print(json.dumps({"variables": dict(os.environ), "finders": finders, "written": written}))
"""

needs_podman = pytest.mark.skipif(
    working_runtime() is None,
    reason="needs root, podman and a runtime (crun, runc) that works here",
)


@pytest.fixture
def podman() -> Iterator[Podman]:
    with podman_of() as made:
        yield made


def start(daemon: Daemon, command: list[str], environment: dict[str, str], uid: int = 0) -> int:
    """Submit a job with a lease of 1 GiB."""
    wanted = job(*command, memory=G, environment=environment)
    status, content = call(daemon, uid, "POST", "/v1/jobs", wanted)
    assert status == 201, content
    return int(content["id"])


def used(daemon: Daemon, number: int) -> int:
    return sum(lease["used"] or 0 for lease in daemon.job(number)["leases"])


def containers(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the processes on the GPUs that are in containers."""
    listed = [process for gpu in daemon.status()["gpus"] for process in gpu["processes"] or ()]
    return [process for process in listed if process["container"]]


@needs_podman
def test_a_container_gets_the_environment_and_the_hooks_of_the_lease(
    daemon: Daemon, podman: Podman
) -> None:
    command = podman.run(PYTHON, "-c", SEEN, options=("--gpus", "all"))
    environment = {**os.environ, **podman.environment()}
    done = daemon.run("run", "--mem", "1G", "--", *command, env=environment)
    seen = json.loads(done.stdout)
    variables = seen["variables"]
    gpus = [gpu["uuid"] for gpu in daemon.status()["gpus"]]
    assert variables["CUDA_VISIBLE_DEVICES"] in gpus
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert json.loads(variables["GPULEASE_HOOK"])["gpus"][0]["memory"] == G
    assert "GpuleaseFinder" in seen["finders"], "the hooks work"
    assert seen["written"] == "Read-only file system"
    assert mentions(done.stderr, "gpulease: ", "--gpus all", "simulated")


@needs_podman
def test_a_run_inside_a_job_passes_the_lease_of_that_job_to_a_container(
    daemon: Daemon, podman: Podman
) -> None:
    command = podman.run("/usr/bin/env", options=("--gpus", "all"))
    inner = [sys.executable, "-m", "gpulease.cli", "run", "--mem", "512M", "--", *command]
    environment = {**os.environ, **podman.environment(), "GPULEASE_SOCKET": str(daemon.socket)}
    done = daemon.run("run", "--mem", "1G", "--", "sh", "-c", shlex.join(inner), env=environment)
    assert f"GPULEASE_MEMORY={512 * M}" in done.stdout.splitlines()
    assert mentions(done.stderr, "gpulease: ", "--gpus all", "simulated")


@needs_podman
def test_a_container_counts_for_its_job_and_ends_with_it(daemon: Daemon, podman: Podman) -> None:
    number = start(daemon, podman.run(PYTHON, "-c", HUNGRY), podman.environment())
    wait_for("its memory counts", lambda: used(daemon, number) > 290 * M)
    assert [each["job"] for each in containers(daemon)] == [number]

    daemon.cancel(number)

    assert daemon.wait_until(number, "ended")["outcome"] == "cancelled"
    assert containers(daemon) == []


@needs_podman
def test_the_exit_code_of_a_container_is_that_of_its_job(daemon: Daemon, podman: Podman) -> None:
    command = podman.run("/bin/sh", "-c", "exit 7")
    environment = {**os.environ, **podman.environment()}
    done = daemon.run("run", "--mem", "1G", "--", *command, env=environment, check=False)
    assert done.returncode == 7, done.stderr


@needs_podman
def test_podman_is_asked_for_the_leased_gpu_by_its_cdi_name(
    make_daemon: Callable[..., Daemon], tmp_path: Path, podman: Podman
) -> None:
    uuid = f"GPU-{os.getpid()}"
    stand_in = StandIn(tmp_path, gpus=[Card(uuid=uuid)])
    daemon = make_daemon(simulate=None, environment=stand_in.environment()).start()
    spec = Path(f"/var/run/cdi/gpulease-test-{os.getpid()}.json")
    spec.parent.mkdir(exist_ok=True)
    spec.write_text(cdi_spec(uuid))
    try:
        number = start(daemon, podman.run("/usr/bin/env"), podman.environment())
        assert daemon.wait_until(number, "ended")["exit_status"] == 0
    finally:
        spec.unlink()
    lines = daemon.run("logs", str(number)).stdout.splitlines()
    assert f"INJECTED={uuid}" in lines
    assert f"CUDA_VISIBLE_DEVICES={uuid}" in lines


@contextmanager
def daemon_with_open_hooks() -> Iterator[Daemon]:
    """Yield a daemon, the hooks of which every user can read, unlike those of a checkout."""
    with tempfile.TemporaryDirectory(prefix="gpulease-open-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        package = Path(gpulease.__file__).parent
        shutil.copytree(package, folder / "gpulease", ignore=shutil.ignore_patterns("*.pyc"))
        shutil.copytree(package.parent / "migrations", folder / "migrations")
        made = Daemon(
            folder, settings={"grace": "2s"}, environment={"PYTHONPATH": name}, forked=False
        )
        try:
            yield made.start()
        finally:
            made.end_all()


@needs_podman
@pytest.mark.skipif(not shutil.which("newuidmap"), reason="needs newuidmap, of the package uidmap")
def test_a_user_without_root_runs_containers_and_the_job_ends_with_them(
    user: pwd.struct_passwd,
) -> None:
    with podman_of(user.pw_uid) as podman, daemon_with_open_hooks() as daemon:
        environment = podman.environment()
        hungry = start(daemon, podman.run(PYTHON, "-c", HUNGRY), environment, user.pw_uid)
        wait_for("its memory counts", lambda: used(daemon, hungry) > 290 * M)
        daemon.cancel(hungry)
        daemon.wait_until(hungry, "ended")

        brief = start(daemon, podman.run("/bin/true"), environment, user.pw_uid)
        assert daemon.wait_until(brief, "ended")["exit_status"] == 0, (
            "podman takes no container for running, and leaves no process"
        )


def listed(environment: dict[str, str]) -> str:
    """Return the ids of docker's running containers."""
    return subprocess.run(
        ["docker", "ps", "--quiet"], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and a docker server"
)
def test_a_docker_container_counts_for_its_job_and_ends_with_it(
    user: pwd.struct_passwd, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="gpulease-docker-") as folder,
        docker_in(Path(folder)) as environment,
        daemon_for_all() as daemon,
    ):
        if environment is None:
            pytest.skip("the docker server does not start here: " + Path(folder, "log").read_text())
        run = ["docker", "run", "--network", "none", *OF_THE_HOST]
        # The client leaves at once, or is killed at the end of the grace.
        for command in (run, [*run, "--detach"]):
            hungry = [*command, "here", PYTHON, "-c", HUNGRY]
            number = start(daemon, hungry, environment, user.pw_uid)
            if command is run:
                wait_for("its memory counts", lambda n=number: used(daemon, n) > 290 * M)
                [process] = containers(daemon)
                assert (process["job"], process["user"]) == (number, "root")
                daemon.cancel(number)
            daemon.wait_until(number, "ended")
            assert containers(daemon) == []
            wait_for("docker notes the end", lambda: listed(environment) == "")
