"""One lease for several processes and frameworks: what each takes, seen from outside."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from goldens import mentions
from gpulease.host.state_dir import ensure_ledger
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead

LEASE = 4096 * MIB
SMALLEST = 256 * MIB
SCRIPT = Path(__file__).with_name("sharing_process.py")
TORCH = default_overhead("torch", 1)
TENSORFLOW = default_overhead("tensorflow", 1)


class Sharing:
    """A process of the job."""

    def __init__(
        self, environment: dict[str, str], *arguments: str, stderr: IO[str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", SCRIPT, HOOKS, *arguments],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            text=True,
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
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def variables(
    directory: Path, gpus: int = 1, processes: int | None = None, **inside: str
) -> dict[str, str]:
    made = worker_environment(
        {"PATH": os.environ["PATH"]},
        job="1",
        marker="m",
        gpus=[LeasedGpu(f"GPU-{n}", n, "H100", LEASE, 2 * LEASE) for n in range(gpus)],
        simulated=False,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(processes=processes),
        ledger=ensure_ledger(directory, None),
        overhead_of=lambda framework, _: default_overhead(framework, 1),
    )
    return made | inside


Start = Callable[..., Sharing]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Sharing] = []

    def process(wait_s: float = 60, **wanted: Any) -> Sharing:
        """Start a process that waits so long for others to give way."""
        started.append(Sharing(variables(tmp_path / "1", **wanted), str(wait_s)))
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
    ranks = [start(gpus=gpus, LOCAL_WORLD_SIZE="4") for _ in range(4)]

    for rank, each in enumerate(ranks):
        assert each.ask(f"take tensorflow {rank % gpus} -") == part - TENSORFLOW


def test_a_pool_that_can_shrink_gives_way_to_another_process(start: Start) -> None:
    one, two, three = start(), start(), start()

    one.ask("takes torch 0 0")

    assert two.ask("takes torch 0 0") == LEASE // 2 - TORCH
    assert three.ask("take tensorflow 0 -") == LEASE // 3 - TENSORFLOW
    assert one.ask("limit torch 0") == two.ask("limit torch 0") == LEASE // 3 - TORCH


def test_a_pool_gives_way_no_further_than_what_it_uses(start: Start) -> None:
    one, two = start(), start(wait_s=4)
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


def test_a_part_that_is_too_small_says_what_would_do(start: Start) -> None:
    refused = start(processes=8).ask("take torch 0 -")

    assert mentions(refused, "PyTorch", "8 processes", "512M", "856M", "hint: ", "--mem ")


def test_a_refusal_names_the_framework_of_the_same_process(start: Start) -> None:
    one = start()
    one.ask("take tensorflow 0 -")

    refused = one.ask("take jax 0 -")

    assert mentions(refused, "JAX", "TensorFlow has 4G", "--processes 2")


def test_without_the_ledger_a_process_gets_the_lease_and_a_line(tmp_path: Path) -> None:
    made = variables(tmp_path / "1") | {"GPULEASE_STRICT": "1"}
    (tmp_path / "1" / "ledger").unlink()

    with (tmp_path / "stderr").open("w") as stderr:
        alone = Sharing(made, stderr=stderr)
        sizes = [alone.ask("take torch 0 -"), alone.ask(f"resize torch 0 {SMALLEST}")]
        alone.kill()

    assert sizes == [LEASE - TORCH, SMALLEST]
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert mentions(line, "other processes", "No such file")


def test_a_pool_of_nothing_needs_room_for_its_overhead(start: Start) -> None:
    one, two = start(), start()
    one.ask("take tensorflow 0 -")

    assert "cannot run PyTorch" in two.ask("take torch 0 0")


def test_a_stopped_process_does_not_stop_the_others(start: Start) -> None:
    one, two, three = start(), start(), start()
    one.ask("takes torch 0 0")

    two.ask("hold 0")

    assert three.ask("take torch 0 -") == LEASE // 2 - TORCH


def test_a_process_with_many_open_files_takes_its_part_and_gives_way(start: Start) -> None:
    one, two = start(), start()
    one.ask("many")

    one.ask("takes torch 0 0")

    assert two.ask("take torch 0 -") == LEASE // 2 - TORCH
    assert one.ask("limit torch 0") == LEASE // 2 - TORCH


def test_a_process_that_lost_its_locks_has_them_again_at_the_next_use(start: Start) -> None:
    one, two = start(), start()
    one.ask(f"take tensorflow 0 {1024 * MIB}")

    one.ask("walk")
    one.ask(f"resize tensorflow 0 {1024 * MIB}")

    assert two.ask("take torch 0 -") == LEASE - 1024 * MIB - TENSORFLOW - TORCH


class SharedLease(RuleBasedStateMachine):
    """Processes of one job come, take, give way, give back and are killed at random."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.processes: list[Sharing] = []
        self.pools: dict[Sharing, set[str]] = {}

    some = st.integers(0, 5)
    frameworks = st.sampled_from(["torch", "tensorflow", "jax"])
    sizes = st.integers(0, 4096).map(lambda size: size * MIB)

    def chosen(self, number: int) -> Sharing:
        if number >= len(self.processes):
            made = Sharing(variables(Path(self.folder.name, "1")), "0.2")
            self.processes.append(made)
            self.pools[made] = set()
            return made
        return self.processes[number]

    def takes(self, process: Sharing, framework: str, command: str) -> None:
        if isinstance(process.ask(command), int):
            self.pools[process].add(framework)

    @rule(number=some, framework=frameworks, wanted=sizes)
    def take(self, number: int, framework: str, wanted: int) -> None:
        self.takes(self.chosen(number), framework, f"take {framework} 0 {wanted}")

    @rule(number=some, framework=frameworks, reserved=sizes)
    def take_what_can_shrink(self, number: int, framework: str, reserved: int) -> None:
        self.takes(self.chosen(number), framework, f"takes {framework} 0 {reserved // 4}")

    @rule(number=some, framework=frameworks, wanted=sizes)
    def resize(self, number: int, framework: str, wanted: int) -> None:
        process = self.chosen(number)
        if framework in self.pools[process]:
            process.ask(f"resize {framework} 0 {wanted}")

    @rule(number=some, framework=frameworks)
    def release(self, number: int, framework: str) -> None:
        process = self.chosen(number)
        process.ask(f"release {framework}")
        self.pools[process].discard(framework)

    @rule(number=some)
    def kill(self, number: int) -> None:
        if number < len(self.processes):
            self.processes.pop(number).kill()

    @invariant()
    def no_byte_is_handed_out_twice(self) -> None:
        total = 0
        for process in self.processes:
            outside = sorted(default_overhead(each, 1) for each in self.pools[process])
            total += sum(outside[-1:]) + sum(outside[:-1]) // 2
            total += sum(process.ask(f"limit {each} 0") for each in self.pools[process])
        assert total <= LEASE

    def teardown(self) -> None:
        for process in self.processes:
            process.kill()
        self.folder.cleanup()


TestSharedLease = pytest.mark.slow(SharedLease.TestCase)
SharedLease.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_processes_that_start_at_once_stay_inside_the_lease(start: Start) -> None:
    many = [start(wait_s=2) for _ in range(8)]

    for each in many:
        each.tell("takes torch 0 0")
    answers = [each.answer() for each in many]

    # A refused one has nothing; the others may have given way since they took their pools.
    sizes = [
        each.ask("limit torch 0") + TORCH
        for each, answer in zip(many, answers, strict=True)
        if isinstance(answer, int)
    ]
    assert len(sizes) >= 4
    assert sum(sizes) <= LEASE
