"""Whether a job ended for want of GPU memory, by what it wrote last."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.domain import oom
from gpulease.domain.job import Exit
from gpulease.domain.oom import OutOfMemory, complaint_in
from gpulease.units import GIB, MIB


def recognised(end: Exit | None, tail: str, peak: int | None, leased: int) -> OutOfMemory | None:
    return oom.recognised(end, complaint_in(tail), peak, leased)


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
        (NUMBA, None),
        ("terminate called: cudaErrorMemoryAllocation", None),
    ],
)
def test_each_framework_is_understood(tail: str, lacking: int | None) -> None:
    found = recognised(FAILED, f"epoch 1\n{tail}\nbye\n", None, 4 * GIB)

    assert found is not None
    assert found.lacking == lacking
    assert recognised(ABORTED, tail, None, 4 * GIB) == found


@pytest.mark.parametrize("end", [Exit(0), Exit(), None])
def test_a_job_that_ended_well_had_memory_enough(end: Exit | None) -> None:
    assert recognised(end, TORCH, 4 * GIB, 4 * GIB) is None


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
    assert recognised(FAILED, tail, 4 * GIB, 4 * GIB) is None


@pytest.mark.parametrize(("peak", "is_it"), [(None, False), (GIB, False), (4 * GIB - 1, True)])
def test_a_word_that_may_mean_other_memory_counts_near_the_lease(
    peak: int | None, is_it: bool
) -> None:
    assert (recognised(FAILED, "fatal: Out of memory", peak, 4 * GIB) is not None) is is_it


@given(st.text(), st.integers(0, 2**40))
def test_any_output_is_read(tail: str, peak: int) -> None:
    recognised(FAILED, tail, peak, GIB)
    recognised(FAILED, "CUDA out of memory. Tried to allocate " + tail, peak, GIB)


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
    assert complaint_in(tail).is_sure is (_SIMPLE.search(tail) is not None)


@pytest.mark.parametrize(
    "pattern", [each for each in vars(oom).values() if isinstance(each, re.Pattern)]
)
def test_no_pattern_looks_ahead_without_bound(pattern: re.Pattern[str]) -> None:
    """Or else an output of 64 KiB, tried at each of its places, takes the daemon's time."""
    plain = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", pattern.pattern)
    assert not re.search(r"[*+]|\{\d*,\}", plain), pattern.pattern


def test_an_output_made_to_cost_much_is_read() -> None:
    tail = ("ResourceExhaustedError" * 1490 + "device:CPU" + "device:CP" * 3600)[:65535]
    assert not complaint_in(tail).is_sure
    assert complaint_in(tail + "\n" + TENSORFLOW).is_sure
