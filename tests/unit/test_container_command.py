"""Commands that start containers, rewritten so that a container gets the lease."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.worker.container_command import starts_container, with_lease

ONE, TWO = "GPU-aaaa", "GPU-bbbb"
HOOKS = Path("/opt/gpulease/hooks")
LEASE = ("GPULEASE_HOOK", "CUDA_VISIBLE_DEVICES")
ENV = "--env CUDA_VISIBLE_DEVICES --env GPULEASE_HOOK --env PYTHONPATH=/opt/gpulease/hooks"
MOUNT = "--mount type=bind,source=/opt/gpulease/hooks,target=/opt/gpulease/hooks,readonly"
DOCKER_ONE = f"--gpus device={ONE} --env NVIDIA_VISIBLE_DEVICES={ONE} {ENV} {MOUNT}"
PODMAN_ONE = (
    f"--device nvidia.com/gpu={ONE} --env NVIDIA_VISIBLE_DEVICES=void {ENV} {MOUNT}"
)  # fmt: skip


def rewritten(command: str, *gpus: str) -> str:
    argv, _ = with_lease(shlex.split(command), gpus=gpus, variables=LEASE, hooks=HOOKS)
    return shlex.join(argv)


def dropped(command: str, *gpus: str) -> tuple[str, ...]:
    return dropped_of(with_lease(shlex.split(command), gpus=gpus, variables=LEASE, hooks=HOOKS)[1])


def dropped_of(notice: str) -> tuple[str, ...]:
    """Return the options that a notice says are dropped."""
    return tuple(filter(None, notice.partition("in place of: ")[2].split(", ")))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("docker run img a", f"docker run {DOCKER_ONE} img a"),
        ("nerdctl run img", f"nerdctl run {DOCKER_ONE} img"),
        ("podman run img", f"podman run {PODMAN_ONE} img"),
        ("/usr/bin/podman container run img", f"/usr/bin/podman container run {PODMAN_ONE} img"),
        ("docker -H tcp://h --debug run img", f"docker -H tcp://h --debug run {DOCKER_ONE} img"),
    ],
)
def test_the_container_gets_the_devices_the_variables_and_the_hooks(
    command: str, expected: str
) -> None:
    assert rewritten(command, ONE) == expected
    assert starts_container(shlex.split(command))


@pytest.mark.parametrize(
    "command",
    [
        "docker exec c run --gpus all",
        "docker -D exec c run --gpus all",
        "docker compose run web",
        "docker -D compose run web",
        "podman --remote -r compose run web",
        "docker ps",
        "docker",
        "python train.py run --gpus all",
        "bash -c 'docker run --gpus all img'",
    ],
)
def test_any_other_command_stays_unchanged(command: str) -> None:
    assert rewritten(command, ONE) == shlex.join(shlex.split(command))
    assert not starts_container(shlex.split(command))


@pytest.mark.parametrize(
    ("options", "chooses"),
    [
        ("--gpus all", "--gpus all"),
        ("--gpus=all", "--gpus=all"),
        ("--rm -it --gpus 2", "--gpus 2"),
        ("--device nvidia.com/gpu=all", "--device nvidia.com/gpu=all"),
        ("--device=/dev/nvidia0", "--device=/dev/nvidia0"),
        ("-e NVIDIA_VISIBLE_DEVICES=all", "-e NVIDIA_VISIBLE_DEVICES=all"),
        ("-itdeCUDA_VISIBLE_DEVICES=3", "-itdeCUDA_VISIBLE_DEVICES=3"),
        ("--env=CUDA_VISIBLE_DEVICES", "--env=CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_gpus_that_the_command_names_are_replaced_by_those_of_the_lease(
    options: str, chooses: str
) -> None:
    command = f"docker run {options} img"
    assert dropped(command, ONE) == (chooses,)
    rest = options.removesuffix(chooses).split()
    assert rewritten(command, ONE) == shlex.join(
        ["docker", "run", *DOCKER_ONE.split(), *rest, "img"]
    )


@pytest.mark.parametrize(
    "options",
    [
        "--rm -v /data:/data -w /src --shm-size=8g --device /dev/fuse --runtime nvidia",
        "-u 1000 --name --gpus -e A=1 --env B",
        "--privileged --init --read-only -itp 80:80",
        "--rootfs",
    ],
)
def test_other_options_and_the_command_in_the_container_stay_as_they_are(options: str) -> None:
    rest = f"{options} img python t.py --gpus all -e CUDA_VISIBLE_DEVICES=1 run"
    assert rewritten(f"docker run {rest}", ONE) == f"docker run {DOCKER_ONE} {rest}"
    assert dropped(f"docker run {rest}", ONE) == ()


def test_the_option_before_a_double_dash_is_the_last() -> None:
    assert rewritten("docker run -- --gpus", ONE) == f"docker run {DOCKER_ONE} -- --gpus"


def test_several_gpus_are_one_word_of_csv_for_docker_and_a_device_each_for_podman() -> None:
    docker = shlex.split(rewritten("docker run img", ONE, TWO))
    assert docker[2:4] == ["--gpus", f'"device={ONE},{TWO}"']
    assert f"NVIDIA_VISIBLE_DEVICES={ONE},{TWO}" in docker
    podman = rewritten("podman run img", ONE, TWO)
    assert f"--device nvidia.com/gpu={ONE} --device nvidia.com/gpu={TWO} --env" in podman


def test_a_container_gets_no_gpu_where_they_are_simulated() -> None:
    command = "docker run --gpus all --runtime nvidia img"
    assert dropped(command) == ("--gpus all", "--runtime nvidia")
    assert rewritten(command) == f"docker run --env NVIDIA_VISIBLE_DEVICES=void {ENV} {MOUNT} img"


def test_the_hooks_come_before_the_python_path_of_the_command() -> None:
    found = rewritten("docker run -e PYTHONPATH=/a -e PYTHONPATH=/src:/lib img", ONE)
    assert found == f"docker run {DOCKER_ONE} img".replace(
        "hooks --mount", "hooks:/src:/lib --mount"
    )
    # By name it has the value of the job, which begins with the hooks.
    assert rewritten("docker run -e PYTHONPATH img", ONE).endswith("-e PYTHONPATH img")


def test_the_ledger_of_the_job_can_be_written() -> None:
    argv, _ = with_lease(["podman", "run", "img"], gpus=[], variables=(), hooks=HOOKS, ledger="/l")
    assert argv[-3:] == ("--mount", "type=bind,source=/l,target=/l", "img")


words = st.lists(st.sampled_from(["-it", "--gpus", "--rm", "-e", "run", "img", "--", "a=b", "-v"]))


@given(words, words)
def test_what_is_not_dropped_keeps_its_order(before: list[str], after: list[str]) -> None:
    argv = ["docker", *before, "run", *after]
    found, notice = with_lease(argv, gpus=[ONE], variables=LEASE, hooks=HOOKS)
    left = iter(found)
    gone = " ".join(dropped_of(notice)).split()
    kept = [word for word in argv if word not in gone]
    assert all(word in left for word in kept), json.dumps(found)
