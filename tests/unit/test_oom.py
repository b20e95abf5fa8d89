"""Whether a job ended for want of GPU memory, by what it wrote last."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.domain import oom
from gpulease.domain.job import Exit
from gpulease.domain.oom import OutOfMemory, find_memory_errors
from gpulease.units import GIB, MIB


def diagnose_oom(end: Exit | None, tail: str, peak: int | None, leased: int) -> OutOfMemory | None:
    return oom.diagnose_oom(end, find_memory_errors(tail), peak, leased)


FAILED = Exit(1)
ABORTED = Exit(None, 6)

TORCH = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity
of 79.11 GiB of which 12.06 MiB is free. Process 1 has 4.00 GiB memory in use. 3.39 GiB allowed
"""
OLD_TORCH = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total"
NEW_TORCH = (
    "torch.AcceleratorError: Allocation was preemptively rejected because it would exceed "
    "per_process_memory_fraction limit. Requested size: "
)
ACCELERATOR = "torch.AcceleratorError: CUDA error: out of memory"
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
TENSORFLOW = """tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node
__wrapped__MatMul}} OOM when allocating tensor with shape[40000,40000] and type float on
/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:MatMul]
"""
DRIVER = (
    "failed to allocate 3.25GiB (3489660928 bytes) from device: "
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory"
)
JAX = (
    "jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
    "6400000000 bytes."
)
CUPY = (
    "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,000,000,000 bytes "
    "(allocated so far: 0 bytes, limit set to: 4,294,967,296 bytes)."
)
RMM = (
    "MemoryError: std::bad_alloc: out_of_memory: RMM failure at:/rmm/cpp/src/mr/detail/"
    "limiting_resource_adaptor_impl.cpp:61: Exceeded memory limit 1048576; Allocated bytes 0; "
    "Requested bytes 2097152"
)
NUMBA = "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("tail", "lacking"),
    [
        (TORCH, int(2.5 * GIB)),
        (OLD_TORCH, 20 * MIB),
        (NEW_TORCH + "2.50 GiB", int(2.5 * GIB)),
        (NEW_TORCH + "2147483648 bytes", 2 * GIB),
        (NEW_TORCH + "2147483648", 2 * GIB),
        (ACCELERATOR, None),
        (CUBLAS, None),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", None),
        ("cupy.cuda.cufft.CuFFTError: CUFFT_ALLOC_FAILED", None),
        (TENSORFLOW, None),
        (DRIVER, int(3.25 * GIB)),
        (JAX, 6_400_000_000),
        (CUPY, 8_000_000_000),
        (RMM, 2 * MIB),
        (NUMBA, None),
        ("terminate called: cudaErrorMemoryAllocation", None),
    ],
)
def test_each_framework_is_understood(tail: str, lacking: int | None) -> None:
    found = diagnose_oom(FAILED, f"epoch 1\n{tail}\nbye\n", None, 4 * GIB)

    assert found is not None
    assert found.lacking == lacking
    assert diagnose_oom(ABORTED, tail, None, 4 * GIB) == found


CAUGHT = "caught: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    go()\n'
BY_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    "before",
    [
        f"{CAUGHT}falling back\n{FRAMES}",
        f"{TORCH}falling back\n{FRAMES}",
        f"{TENSORFLOW}{FRAMES}ValueError: a\n{DURING}{FRAMES}",
    ],
)
@pytest.mark.parametrize(
    "last", ["KeyError: 'typo in config'", "lab.ConfigError: no", "RuntimeError: no such layer"]
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_an_exception_that_came_later_and_of_something_else_decides(
    before: str, last: str, ends: str
) -> None:
    tail = f"{before}{last}\n".replace("\n", ends)
    assert diagnose_oom(FAILED, tail, 4 * GIB, 4 * GIB) is None


@pytest.mark.parametrize(
    "tail",
    [
        f"{TORCH}{BY_CAUSE}{FRAMES}lab.TrainingFailed: epoch 1",
        f"{TORCH}{DURING}{FRAMES}KeyError: 'x'\n{DURING}{FRAMES}ValueError: y\nbye",
        f"{TORCH}{FRAMES}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
        f"{TORCH}{FRAMES}subprocess.CalledProcessError: Command 'x' returned 1",
        f"Process Process-1:\n{TORCH}Process Process-2:\n{FRAMES}KeyError: 0",
        f"{CAUGHT}{FRAMES}RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        f"{FRAMES}KeyError: 'caught'\n{TORCH}",
        f"{FRAMES}KeyError: 'caught'\n{CAUGHT}",
        f"{CAUGHT}Traceback (most recent call last):\n  cut off",
    ],
)
def test_an_exception_that_may_come_of_a_full_gpu_hides_it_not(tail: str) -> None:
    assert diagnose_oom(FAILED, tail, None, 4 * GIB) is not None


@pytest.mark.parametrize("end", [Exit(0), Exit(), None])
def test_a_job_that_ended_well_had_memory_enough(end: Exit | None) -> None:
    assert diagnose_oom(end, TORCH, 4 * GIB, 4 * GIB) is None


@pytest.mark.parametrize(
    "tail",
    [
        "",
        "ValueError: no such layer",
        TENSORFLOW.replace("GPU:0 by", "CPU:0 by").replace("\n", " "),
        "MemoryError",
    ],
)
def test_other_failures_are_not_taken_for_it(tail: str) -> None:
    assert diagnose_oom(FAILED, tail, 4 * GIB, 4 * GIB) is None


@pytest.mark.parametrize(("peak", "is_it"), [(None, False), (GIB, False), (4 * GIB - 1, True)])
def test_a_word_that_may_mean_other_memory_counts_near_the_lease(
    peak: int | None, is_it: bool
) -> None:
    assert (diagnose_oom(FAILED, "fatal: Out of memory", peak, 4 * GIB) is not None) is is_it


@given(st.text(), st.integers(0, 2**40))
def test_any_output_is_read(tail: str, peak: int) -> None:
    diagnose_oom(FAILED, tail, peak, GIB)
    diagnose_oom(FAILED, "CUDA out of memory. Tried to allocate " + tail, peak, GIB)


_PIECES = [
    *(
        "OOM when allocating tensor",
        "ResourceExhaustedError",
        "device:CPU",
        "device:CP",
        "device:GPU",
    ),
    *("failed to allocate ", "out of memory", "Tried to allocate 2 GiB", "\n", "\r", "\x85", " x "),
]
_SIMPLE = re.compile(
    r"(?:OOM when allocating tensor|ResourceExhaustedError)(?![^\n]*device:CPU)"
    r"|failed to allocate [^\n]{0,200}out of memory"
)


@given(st.lists(st.sampled_from(_PIECES), max_size=30))
def test_a_device_counts_that_is_named_later_in_the_line(pieces: list[str]) -> None:
    tail = "".join(pieces)
    assert find_memory_errors(tail).is_sure is (_SIMPLE.search(tail) is not None)


def test_an_output_made_to_cost_much_is_read() -> None:
    tail = ("ResourceExhaustedError" * 1490 + "device:CPU" + "device:CP" * 3600)[:65535]
    assert not find_memory_errors(tail).is_sure
    assert find_memory_errors(tail + "\n" + TENSORFLOW).is_sure
