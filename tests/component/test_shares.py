"""One lease for several processes and frameworks: what each takes, seen from outside."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.host.ledger import ensure_ledger
from gpulease.worker.environment import (
    HOOKS,
    MIB,
    LeasedGpu,
    WorkerOptions,
    default_overhead,
    worker_environment,
)

LEASE = 4096 * MIB
SMALLEST = 256 * MIB
SCRIPT = Path(__file__).with_name("sharing_process.py")
TORCH = default_overhead("torch", 1)
TENSORFLOW = default_overhead("tensorflow", 1)


class Sharing:
    """A process of the job."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", SCRIPT, HOOKS],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, command: str) -> Any:
        self.tell(command)
        return self.answer()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        answer, failures = json.loads(self.process.stdout.readline())
        assert failures == []
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


Start = Callable[..., Sharing]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Sharing] = []

    def process(
        gpus: int = 1, lease: int = LEASE, processes: int | None = None, **inside: str
    ) -> Sharing:
        made = worker_environment(
            {"PATH": os.environ["PATH"]},
            job="1",
            marker="m",
            gpus=[LeasedGpu(f"GPU-{n}", n, "H100", lease, 2 * LEASE) for n in range(gpus)],
            simulated=False,
            driver=None,
            hooks=HOOKS,
            options=WorkerOptions(processes=processes),
            ledger=ensure_ledger(tmp_path / "1", None),
            overhead_of=lambda framework, _: default_overhead(framework, 1),
        )
        started.append(Sharing(made | inside))
        return started[-1]

    yield process
    for each in started:
        if each.process.returncode is None:
            each.kill()


def test_the_first_framework_takes_the_lease(start: Start) -> None:
    one = start()

    assert one.ask("take torch 0 -") == LEASE - TORCH
    assert one.ask("take torch 0 -") == LEASE - TORCH


def test_a_second_process_gets_what_the_first_left(start: Start) -> None:
    one, two = start(), start()

    one.ask(f"take torch 0 {1024 * MIB}")

    assert two.ask("take tensorflow 0 -") == LEASE - 1024 * MIB - TORCH - TENSORFLOW


def test_a_second_process_that_finds_nothing_is_refused(start: Start) -> None:
    one, two = start(), start()

    one.ask("take tensorflow 0 -")
    refused = two.ask("take torch 0 -")

    assert f"process {one.process.pid} (" in refused
    assert "4G" in refused
    assert "--processes" in refused


def test_the_part_of_a_killed_process_is_free_again(start: Start) -> None:
    one, two = start(), start()
    one.ask("take tensorflow 0 -")

    one.kill()

    assert two.ask("take torch 0 -") == LEASE - TORCH


def test_frameworks_of_one_process_share_the_lease(start: Start) -> None:
    one = start()

    first = one.ask(f"take tensorflow 0 {1024 * MIB}")
    second = one.ask("take jax 0 -")

    overhead = TENSORFLOW + default_overhead("jax", 1) // 2  # they share a context
    assert first + second + overhead == LEASE


def test_a_known_number_of_processes_divides_the_lease(start: Start) -> None:
    four = [start(processes=4) for _ in range(4)]

    assert [each.ask("take torch 0 -") for each in four] == [LEASE // 4 - TORCH] * 4


@pytest.mark.parametrize(
    ("gpus", "part"), [(1, LEASE // 4), (2, LEASE // 2), (3, LEASE // 2), (4, LEASE)]
)
def test_ranks_divide_the_gpus_that_they_share(start: Start, gpus: int, part: int) -> None:
    ranks = [start(gpus, LOCAL_WORLD_SIZE="4") for _ in range(4)]

    for rank, each in enumerate(ranks):
        assert each.ask(f"take tensorflow {rank % gpus} -") == part - TENSORFLOW


def test_a_pool_that_can_shrink_gives_way_to_another_process(start: Start) -> None:
    one, two, three = start(), start(), start()

    one.ask("takes torch 0 0")

    assert two.ask("takes torch 0 0") == LEASE // 2 - TORCH
    assert three.ask("take tensorflow 0 -") == LEASE // 3 - TENSORFLOW
    assert one.ask("limit torch 0") == two.ask("limit torch 0") == LEASE // 3 - TORCH


def test_a_pool_gives_way_no_further_than_what_it_uses(start: Start) -> None:
    one, two = start(), start()
    used = 2600 * MIB

    one.ask(f"takes torch 0 {used}")

    assert two.ask("take jax 0 -") == LEASE - used - 2 * TORCH


def test_a_pool_gives_way_to_another_framework_of_its_process(start: Start) -> None:
    one = start()

    one.ask("takes torch 0 0")

    assert one.ask("take tensorflow 0 -") == LEASE // 2 - TENSORFLOW
    assert one.ask("limit torch 0") == LEASE // 2 - TORCH


def test_a_script_that_closes_all_descriptors_keeps_its_part(start: Start) -> None:
    one, two = start(), start()
    one.ask("take tensorflow 0 -")

    one.ask("close")
    one.ask(f"resize tensorflow 0 {2048 * MIB}")

    assert two.ask("take torch 0 -") == LEASE - 2048 * MIB - TENSORFLOW - TORCH


def test_a_forked_child_takes_a_part_of_its_own(start: Start) -> None:
    one = start()
    one.ask(f"take tensorflow 0 {1024 * MIB}")

    assert one.ask("fork torch 0") == LEASE - 1024 * MIB - TENSORFLOW - TORCH
    assert one.ask("take torch 0 -") > 2048 * MIB


def test_other_users_can_neither_read_nor_lock_the_ledger(tmp_path: Path) -> None:
    path = Path(ensure_ledger(tmp_path / "1", (1234, 1235)))

    status = path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (1234, 1235, 0o600)
    assert ensure_ledger(tmp_path / "1", (1234, 1235)) == str(path)
