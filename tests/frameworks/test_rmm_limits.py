"""What a real RMM makes of its lease, without a GPU.

The limits are read from RMM's own C++ objects. Where it would allocate, a function of the test is
its upstream, and sees the sizes.
"""

import json
import os
import subprocess
from typing import Any

import pytest

from frameworks.environments import python_of
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead

LEASES = (8192 * MIB, 4096 * MIB)
POOLS = [lease - default_overhead("rmm", 2) for lease in LEASES]
SMALLEST = min(POOLS)
GIB = 1024 * MIB

START = """
import json, rmm
from rmm import mr

handed = []
def allocate(size, stream=None):
    handed.append(size)
    return 1 << 20
def upstream():
    return mr.CallbackMemoryResource(allocate, lambda pointer, size, stream=None: None)
def limit(device):
    return mr.get_per_device_resource(device).get_allocation_limit()
found = None
"""


def rmm(source: str, *, simulated: bool = False) -> Any:
    """Return what a script leaves in `found` in a lease of two GPUs."""
    variables = worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        job="j1",
        marker="m",
        gpus=[LeasedGpu(f"GPU-{n}", n, "H100", size, 80 << 30) for n, size in enumerate(LEASES)],
        simulated=simulated,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(),
    )
    child = subprocess.run(
        [python_of("rmm"), "-c", f"{START}\n{source}\nprint(json.dumps(found))"],
        env=variables, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert (child.returncode, child.stderr) == (0, "")
    return json.loads(child.stdout)


def test_each_gpu_gets_the_pool_of_its_lease_as_its_limit_at_its_first_allocation() -> None:
    """The allocation itself fails: there is no GPU."""
    source = """
before = [type(mr.get_per_device_resource(device)).__name__ for device in (0, 1)]
for device in (0, 1):
    try:
        mr.get_per_device_resource(device).allocate(100)
    except MemoryError:
        pass
found = [before, [limit(0), limit(1)]]
"""
    assert rmm(source) == [["CallbackMemoryResource"] * 2, POOLS]


def test_an_allocation_beyond_the_lease_fails_and_one_within_it_does_not() -> None:
    source = f"""
mr.set_per_device_resource(0, upstream())
resource = mr.get_per_device_resource(0)
resource.allocate({POOLS[0] - GIB})
try:
    resource.allocate({GIB} + 1)
except MemoryError as error:
    found = [type(error).__name__, handed]
"""
    assert rmm(source) == ["MemoryError", [POOLS[0] - GIB]]


def test_a_resource_that_a_script_sets_is_limited_too() -> None:
    source = f"""
mr.set_per_device_resource(0, mr.CudaMemoryResource())
mr.set_per_device_resource(1, mr.LimitingResourceAdaptor(mr.CudaMemoryResource(), {80 * GIB}))
found = [limit(0), limit(1)]
mr.set_per_device_resource(0, mr.LimitingResourceAdaptor(mr.CudaMemoryResource(), {MIB}))
found.append(limit(0))
"""
    assert rmm(source) == [*POOLS, MIB]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ("", SMALLEST // 2),
        (f", {80 * GIB}", SMALLEST),
        (', "1GiB"', GIB),
        (', initial_pool_size="70 GiB", maximum_pool_size="80GiB"', SMALLEST),
        (f", maximum_pool_size={512 * MIB}, initial_pool_size={2 * GIB}", 512 * MIB),
    ],
)
def test_a_pool_begins_with_no_more_than_the_lease(arguments: str, first: int) -> None:
    source = f"""
pool = mr.PoolMemoryResource(upstream(){arguments})
found = [handed, pool.pool_size(), isinstance(pool, mr.PoolMemoryResource)]
"""
    assert rmm(source) == [[first], first, True]


def test_a_resource_on_top_of_a_limited_one_or_a_pool_stays_what_the_script_has_set() -> None:
    source = f"""
{STATISTICS}
try:
    mr.get_per_device_resource(0).allocate(100)
except MemoryError:
    pass
found = [type(mr.get_per_device_resource(0)).__name__]
mr.set_per_device_resource(1, mr.PoolMemoryResource(upstream(), {MIB}))
found += [mr.get_per_device_resource(1).pool_size()]
"""
    assert rmm(source) == ["StatisticsResourceAdaptor", MIB]


STATISTICS = """
mr.set_per_device_resource(0, mr.StatisticsResourceAdaptor(mr.get_per_device_resource(0)))
"""
"""What rmm.statistics.enable_statistics() does, on the GPU that is the current one."""


def test_an_arena_is_no_larger_than_the_lease() -> None:
    """RMM's own asks the GPU for its size; another class is in its place here."""
    source = f"""
import os
from _gpulease_hooks import lease, rmm_hook

class Arena:
    def __new__(cls, upstream, size, dump):
        handed.append([size, dump])
        return object.__new__(cls)
    def __init__(self, *arguments, **named):
        pass

held = lease.Lease(os.environ["GPULEASE_HOOK"])
Limited = rmm_hook._Limits(rmm, held, held.gpus).arena(Arena)
for size in [None, {80 * GIB}, "1GiB"]:
    Limited(None, size, True)
found = handed
"""
    assert rmm(source) == [[SMALLEST, True], [SMALLEST, True], [GIB, True]]


def test_reinitialize_gets_the_sizes_of_the_lease_and_leaves_a_limit() -> None:
    """RMM's own initialisation needs a GPU; what it is handed is read at its last line of Python.

    RMM then forgets the resources, as here, and makes new ones.
    """
    source = f"""
def initialize(**options):
    handed.append([options["initial_pool_size"], options["maximum_pool_size"]])
    set_plain(0, mr.CudaMemoryResource())

set_plain = mr.set_per_device_resource.__wrapped__
rmm.rmm._initialize = initialize
rmm.reinitialize(pool_allocator=True)
rmm.reinitialize(True, maximum_pool_size="1GiB", initial_pool_size={80 * GIB})
rmm.reinitialize(managed_memory=True)
found = [handed, limit(0)]
"""
    handed, limit = rmm(source)

    assert handed == [[POOLS[0] // 2, POOLS[0]], [GIB, GIB], [None, None]]
    assert limit == POOLS[0]


def test_on_simulated_gpus_nothing_of_rmm_is_touched() -> None:
    source = "found = type(mr.get_per_device_resource(0)).__name__"

    assert rmm(source, simulated=True) == "CudaMemoryResource"
