"""What several processes and frameworks of one job are handed together: at most the lease.

The frameworks are real, the GPUs are not: see faked_gpus.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from frameworks.environments import TORCHES, python_of
from frameworks.tensorflow_leases import BASE, ZYGOTE
from gpulease.host.state_dir import ensure_ledger
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead
from process_rig import wait_until

LEASE, TOTAL = 4096 * MIB, 81920 * MIB
SCRIPT = Path(__file__).with_name("faked_gpus.py")
NEAR = 2 * MIB
"""Shares are rounded down."""
TF, TORCH, JAX = (default_overhead(name, 1) for name in ("tensorflow", "torch", "jax"))
USE_ONE = "gpu = tf.config.list_physical_devices('GPU'); "

needs_tensorflow = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow"),
]


Launch = Callable[[dict[str, str], tuple[str, ...], int, int], tuple[int, Callable[[], object]]]
"""Starts faked_gpus.py with variables, arguments, stdin and stdout; returns its pid and a wait."""


class Process:
    """A process with frameworks."""

    def __init__(self, launch: Launch, variables: dict[str, str], *arguments: str) -> None:
        stdin, write = os.pipe()
        read, stdout = os.pipe()
        self.pid, self._wait = launch(variables, arguments, stdin, stdout)
        os.close(stdin)
        os.close(stdout)
        self._expressions, self._answers = os.fdopen(write, "w"), os.fdopen(read)

    def tell(self, expression: str) -> None:
        self._expressions.write(expression + "\n")
        self._expressions.flush()

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._answers.readline())
        return found

    def ask(self, expression: str) -> Any:
        self.tell(expression)
        answer = self.answer()
        assert "error" not in answer, answer
        return answer["value"]

    def refused(self, expression: str) -> str:
        self.tell(expression)
        return str(self.answer()["error"])

    def kill(self) -> None:
        if self._answers.closed:
            return
        os.kill(self.pid, signal.SIGKILL)
        self._wait()
        self._expressions.close()
        self._answers.close()


def launched(python: str) -> Launch:
    """Return what starts a Python for each process."""

    def launch(
        variables: dict[str, str], arguments: tuple[str, ...], stdin: int, stdout: int
    ) -> tuple[int, Callable[[], object]]:
        made = subprocess.Popen(
            [python, "-W", "ignore", SCRIPT, *arguments],
            env=variables, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return made.pid, made.wait

    return launch


@pytest.fixture(scope="module")
def forked() -> Iterator[Launch]:
    """Yield what forks a Python that has imported TensorFlow, which takes seconds, for each."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    zygote = subprocess.Popen(
        [sys.executable, "-W", "ignore", ZYGOTE, str(theirs.fileno())],
        env=BASE, pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()

    def launch(
        variables: dict[str, str], arguments: tuple[str, ...], stdin: int, stdout: int
    ) -> tuple[int, Callable[[], object]]:
        message = json.dumps({"variables": variables, "arguments": arguments})
        socket.send_fds(ours, [message.encode()], [stdin, stdout])
        pid = int(ours.recv(64))
        return pid, lambda: wait_until(lambda: not Path(f"/proc/{pid}").exists(), "its end")

    with ours, zygote:
        yield launch
        ours.shutdown(socket.SHUT_RDWR)


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    started: list[Process] = []

    def process(
        environment: str = "", beside: tuple[str, ...] = (), gpus: int = 1,
        processes: int | None = None, **inside: str,
    ) -> Process:  # fmt: skip
        made = worker_environment(
            BASE,
            job="1",
            marker="m",
            gpus=[LeasedGpu(f"GPU-{n}", n, "H100", LEASE, TOTAL) for n in range(gpus)],
            simulated=False,
            driver=None,
            hooks=HOOKS,
            options=WorkerOptions(processes=processes),
            overhead_of=lambda framework, _: default_overhead(framework, 1),
            ledger=ensure_ledger(tmp_path / "1", None),
        )
        if environment:
            launch = launched(python_of(environment))
        else:
            launch = launched(sys.executable) if beside else request.getfixturevalue("forked")
        started.append(
            Process(
                launch,
                made | inside,
                str(gpus),
                str(TOTAL),
                *(packages(python_of(other)) for other in beside),
            )
        )
        return started[-1]

    yield process
    for each in started:
        each.kill()


def packages(python: str) -> str:
    return str(next(Path(python).parent.parent.glob("lib/python3*/site-packages")))


def near(size: int) -> Any:
    return pytest.approx(size, abs=NEAR)


class TestTensorFlow:
    pytestmark = needs_tensorflow

    def test_a_second_process_is_refused_until_the_first_has_ended(self, start: Start) -> None:
        one, two = start(), start()

        assert one.ask("tensorflow()") == [LEASE - TF]
        refused = two.refused("tensorflow()")
        one.kill()

        assert f"process {one.pid} (" in refused
        assert two.ask("tensorflow()") == [LEASE - TF]

    def test_what_a_script_asks_for_itself_is_what_it_takes(self, start: Start) -> None:
        one, two = start(), start()
        limit = "tf.config.LogicalDeviceConfiguration(1024)"
        setup = f"{USE_ONE} tf.config.set_logical_device_configuration(gpu[0], [{limit}])"

        assert one.ask(f"tensorflow({setup!r})") == [1024 * MIB]
        assert two.ask("tensorflow()") == [LEASE - 1024 * MIB - 2 * TF]

    def test_a_process_that_hides_the_gpu_takes_nothing(self, start: Start) -> None:
        one, two = start(), start()

        assert one.ask("tensorflow('tf.config.set_visible_devices([], \"GPU\")')") == []
        assert two.ask("tensorflow()") == [LEASE - TF]

    def test_settings_that_are_read_before_they_change_take_nothing(self, start: Start) -> None:
        one, two = start(), start()
        setup = "tf.config.threading.get_intra_op_parallelism_threads(); "

        one.ask(f"tensorflow({setup!r} + 'tf.config.set_visible_devices([], \"GPU\")')")

        assert two.ask("tensorflow()") == [LEASE - TF]

    def test_each_process_may_take_one_gpu_of_its_own(self, start: Start) -> None:
        for rank in range(2):
            setup = f"{USE_ONE} tf.config.set_visible_devices(gpu[{rank}], 'GPU')"
            assert start(gpus=2).ask(f"tensorflow({setup!r})") == [LEASE - TF]


@pytest.mark.slow
class TestPyTorch:
    def test_ranks_of_torchrun_share_the_gpus(self, start: Start) -> None:
        gpus = 2
        ranks = [
            start("torch", gpus=gpus, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="4")
            for rank in range(4)
        ]

        for each in ranks:
            each.tell("torch()")
        handed = [each.answer()["value"][rank % gpus] for rank, each in enumerate(ranks)]

        assert handed == [near(LEASE * gpus // 4 - TORCH)] * 4

    @pytest.mark.parametrize("environment", TORCHES)
    def test_a_pool_of_processes_shares_one_gpu_unasked(
        self, start: Start, environment: str
    ) -> None:
        workers = [start(environment) for _ in range(4)]

        for worker in workers:
            worker.ask("torch()")

        assert [worker.ask("handed()") for worker in workers] == [[near(LEASE // 4 - TORCH)]] * 4

    def test_processes_that_see_two_gpus_take_the_one_that_they_use(self, start: Start) -> None:
        both = [start("torch", gpus=2) for _ in range(2)]

        for device, each in enumerate(both):
            each.ask("torch()")
            each.ask(f"contexts.add({device})")

        for device, each in enumerate(both):
            wait_until(
                lambda each=each, device=device: each.ask("handed()")[device] == near(LEASE - TORCH)
            )


@pytest.mark.slow
class TestTwoFrameworks:
    pytestmark = needs_tensorflow

    def test_jax_is_refused_where_tensorflow_has_the_lease(self, start: Start) -> None:
        one = start(beside=("jax",))
        one.ask("tensorflow()")

        refused = one.refused("jax()")

        assert "LeaseTooSmall" in refused
        assert "TensorFlow" in refused
        assert "--processes 2" in refused

    def test_keras_on_jax_gets_all_where_tensorflow_hides_the_gpu(self, start: Start) -> None:
        one = start(beside=("jax",), KERAS_BACKEND="jax")
        hidden = "import keras; tf.config.set_visible_devices([], 'GPU')"

        assert one.ask(f"tensorflow({hidden!r})") == []
        assert one.ask("jax()") == near(LEASE - JAX)

    def test_pytorch_gives_way_to_tensorflow(self, start: Start) -> None:
        one = start(beside=("torch",))

        one.ask("torch()")

        assert one.ask("tensorflow()") == [near(LEASE // 2 - TF)]
        assert one.ask("handed()") == [near(LEASE // 2 - TORCH)]

    def test_two_processes_with_two_frameworks_stay_inside_the_lease(self, start: Start) -> None:
        both = [start(beside=("torch",)) for _ in range(2)]

        for each in both:
            each.tell("torch()")
        for each in both:
            each.answer()
        tensorflow = [each.ask("tensorflow()")[0] for each in both]

        handed = [each.ask("handed()")[0] for each in both]
        assert min(handed + tensorflow) >= 256 * MIB
        assert sum(handed + tensorflow) + 2 * (TF + TORCH // 2) <= LEASE
