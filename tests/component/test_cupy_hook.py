"""What the hook in CuPy reports, and that a script notices nothing of it.

CuPy is a stand-in here, a package of a few lines with the names that its hook uses. The real one
is in tests/frameworks.
"""

from pathlib import Path

import pytest

from gpulease.worker.environment import HOOKS
from gpulease.worker.overhead import MIB, default_overhead
from process_rig import wait_until

from .test_hook_reports import LEASE, Hearer, begun, hearer, lease

__all__ = ["hearer"]

CUPY = """
__version__ = "99.1"
from cupy import cuda
def get_default_memory_pool(): return cuda.pool
"""
CUDA = """
from types import SimpleNamespace
runtime = SimpleNamespace(getDeviceCount=lambda: devices, getDevice=lambda: 0)
devices = 1
class Pool:
    held = limit = 0
    def get_limit(self): return self.limit
    def set_limit(self, size): self.limit = size
    def malloc(self, size):
        if size > 1 << 30:
            raise MemoryError(size)
        self.held += size
        return size
    def total_bytes(self): return self.held
pool = Pool()
_allocator = pool.malloc
def get_allocator(): return _allocator
def set_allocator(wanted):
    global _allocator
    _allocator = wanted
def alloc(size): return _allocator(size)
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(CUPY)
    (tmp_path / "cupy" / "cuda.py").write_text(CUDA)
    return lease(tmp_path, simulated=False) | {
        "PYTHONPATH": f"{HOOKS}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"
    }  # fmt: skip


def test_the_default_pool_is_reported_and_its_allocator_stands_again(
    variables: dict[str, str], hearer: Hearer
) -> None:
    script = begun(
        """
        import cupy
        print(cupy.cuda.alloc(300 << 20))
        print(cupy.cuda.get_allocator() == cupy.cuda.pool.malloc)
        input()
        cupy.cuda.pool.held = 100 << 20
        input()
        """,
        variables,
    )
    assert script.stdin is not None
    hearer.wait(2)  # of which the first is about the limit
    script.stdin.write("\n")
    script.stdin.flush()
    told = {"framework": "cupy", "version": "99.1"}
    gpu = {"gpu": "GPU-0", "peak": 300 * MIB, "limit": LEASE - default_overhead("cupy", 1)}
    less = told | {"gpus": [gpu | {"pool": 100 * MIB}]}
    wait_until(lambda: hearer.told()[-1] == less, "a report of a pool that holds less now")
    out, err = script.communicate("\n", timeout=60)

    assert (script.returncode, err) == (0, "")
    assert out == f"{300 * MIB}\nTrue\n"
    limits = [{"gpu": "GPU-0", "limit": gpu["limit"]}]
    assert hearer.told()[0] == told | {"gpus": limits, "state": "limited"}
    assert hearer.told()[1] == told | {"gpus": [gpu | {"pool": 300 * MIB}]}


@pytest.mark.parametrize(
    "source",
    [
        "import cupy",
        "import cupy; cupy.cuda.set_allocator(lambda size: size); cupy.cuda.alloc(1)",
    ],
)
def test_without_an_allocation_from_the_default_pool_there_is_no_thread_of_ours(
    source: str, variables: dict[str, str]
) -> None:
    then = "; import threading; print(threading.active_count())"

    assert begun(source + then, variables).communicate(timeout=60) == ("1\n", "")


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ("cupy.cuda.devices = 2", ["limited"]),
        ("cupy.cuda.set_allocator(lambda size: size)", ["limited", "failed"]),
        ("cupy.cuda.pool.set_limit(8 << 30)", ["limited", "failed"]),
        ("cupy.cuda.pool.set_limit(0)", ["limited", "failed"]),
        ("cupy.cuda.pool.held = (1 << 64) - 1", ["limited"]),
    ],
)
def test_a_pool_of_which_nothing_sure_is_known_is_not_reported(
    change: str, states: list[str], variables: dict[str, str], hearer: Hearer
) -> None:
    source = f"""
        import cupy
        cupy.cuda.alloc(1)
        {change}
        """
    assert begun(source, variables).communicate(timeout=60) == ("", "")
    assert [told.get("state") for told in hearer.all_told()] == states


def test_what_the_allocator_raises_is_the_scripts_own(
    variables: dict[str, str], hearer: Hearer
) -> None:
    script = begun(
        """
        import cupy
        try:
            cupy.cuda.alloc(2 << 30)
        except MemoryError as error:
            print(error)
        cupy.cuda.alloc(1)
        input()
        """,
        variables,
    )
    hearer.wait(1)

    assert script.communicate("\n", timeout=60) == (f"{2 << 30}\n", "")


def test_a_cupy_that_has_other_names_is_left_alone(
    variables: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "cupy" / "cuda.py").write_text("pool = None\n")

    out, err = begun("import cupy; print(cupy.__version__)", variables).communicate(timeout=60)

    assert (out, err) == ("99.1\n", "")
