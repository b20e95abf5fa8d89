"""Recognises from the end of a job's output that it ran out of GPU memory. Pure.

The patterns match messages of TensorFlow's BFC allocator and kernels, PyTorch's caching allocator,
XLA, CuPy, RMM, ONNX Runtime, the CUDA runtime, and libraries with their own allocators.

If the output ends with a Python traceback, only the last exception and its causes count: a program
may have logged an earlier error and continued. The format is that of Python's module `traceback`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpulease.domain.job import Exit

_BEGINS = "Traceback (most recent call last):"
_CHAINED = frozenset(
    {
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    }
)
_FRAMEWORKS = frozenset(
    {"tensorflow", "keras", "torch", "jax", "jaxlib", "cupy", "numba", "rmm", "cudf", "onnxruntime"}
)
"""Their exceptions may follow from an error that was only logged, as cuDNN's from a full GPU."""
_FROM_OTHER_PROCESSES = frozenset(
    {"subprocess", "multiprocessing", "concurrent", "ray"}
    | {"KeyboardInterrupt", "EOFError", "BrokenPipeError", "ConnectionResetError"}
)
"""Raised in one process because of another, which has logged the cause."""
_UNCLEAR = frozenset({"RuntimeError", "SystemError", "OSError"})
_GPU_WORDS = ("cuda", "cudnn", "cublas", "cufft", "nccl", "gpu", "device", "worker", "memory")
_PROCESS = "Process "
"""With a name and a colon, the line that `multiprocessing` writes before a traceback."""


def relevant_output(text: str) -> str:
    """Return the part of an output that shows why the program ended.

    All of it, unless the last traceback is of an exception that no logged error explains: then from
    the first traceback of its chain of causes.
    """
    lines = [line.rstrip("\r") for line in text.split("\n")]
    begins = [place for place, line in enumerate(lines) if line == _BEGINS]
    if not begins or _has_child_traceback(lines, begins):
        return text
    exception = next((line for line in lines[begins[-1] + 1 :] if line[:1].strip()), "")
    if not exception or _may_have_logged_cause(exception):
        return text
    first = len(begins) - 1
    while first > 0 and _is_chained(lines, begins[first - 1], begins[first]):
        first -= 1
    return "\n".join(lines[begins[first] :])


def _has_child_traceback(lines: Sequence[str], begins: Sequence[int]) -> bool:
    """Tell whether a traceback is that of a child process of `multiprocessing`."""
    before = (lines[place - 1] for place in begins if place > 0)
    return any(line.startswith(_PROCESS) and line.endswith(":") for line in before)


def _may_have_logged_cause(exception: str) -> bool:
    """Tell whether the cause of an exception may only be in the log before it."""
    name, _, message = exception.partition(":")
    if name.partition(".")[0] in _FRAMEWORKS | _FROM_OTHER_PROCESSES:
        return True
    return name in _UNCLEAR and any(word in message.lower() for word in _GPU_WORDS)


def _is_chained(lines: Sequence[str], before: int, begin: int) -> bool:
    """Tell whether the traceback at line `begin` names the one at `before` as its cause."""
    between = [line for line in lines[before + 1 : begin] if line]
    return bool(between) and between[-1] in _CHAINED


_SURE = re.compile(
    r"failed to allocate [^\n]{0,200}out of memory"
    r"|torch\.(?:cuda\.)?OutOfMemoryError"
    r"|CUDA out of memory\. Tried to allocate|CUDA error: out of memory"
    r"|rejected because it would exceed per_process_memory_fraction limit"
    r"|RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)"
    r"|cupy\.cuda\.memory\.OutOfMemoryError"
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|RMM failure at:[^\n]{0,300}(?:Exceeded memory limit|Maximum pool size exceeded)"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
)
"""Messages that only a full GPU causes."""
_ON_A_DEVICE = re.compile(r"OOM when allocating tensor|ResourceExhaustedError")
"""Messages of TensorFlow, which name the device later in the same line."""
_OTHER_DEVICE = "device:CPU"
_LIKELY = re.compile(
    r"out of memory|std::bad_alloc|cannot allocate memory"
    r"|failed to allocate memory for requested buffer|is smaller than requested bytes",
    re.IGNORECASE,
)
"""Messages that a lack of host memory causes as well."""

_NUMBER = r"([0-9][0-9,]{0,20}(?:\.[0-9]{1,6})?)"
_TRIED = re.compile(
    rf"Tried to allocate {_NUMBER} ?(KiB|MiB|GiB)"
    rf"|trying to allocate {_NUMBER} ?(bytes|KiB|MiB|GiB)"
    rf"|Out of memory allocating {_NUMBER} (bytes)"
    rf"|failed to allocate {_NUMBER}(K|M|G|KiB|MiB|GiB) "
    rf"|requested buffer of size {_NUMBER}"
    rf"|smaller than requested bytes of {_NUMBER}"
    rf"|Allocated bytes [0-9]{{1,20}}; Requested bytes {_NUMBER}"
    rf"|memory_fraction limit\. Requested size: {_NUMBER}(?: ?(bytes|KiB|MiB|GiB))?"
)
_UNITS = {"bytes": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 40
_NEAR_PERCENT = 80


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A job ran out of GPU memory; `lacking` is the failed allocation in bytes, if known."""

    lacking: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """What the end of an output shows about memory."""

    is_sure: bool = False
    """GPU memory ran out."""
    is_likely: bool = False
    """GPU memory or host memory ran out."""
    lacking: int | None = None
    """The failed allocation in bytes, if known."""


NO_MEMORY_ERRORS = MemoryErrors()


def find_memory_errors(tail: str) -> MemoryErrors:
    """Return what the end of an output, both streams, shows about memory.

    Errors logged before the last exception count if they may be its cause. The output comes from a
    user, so each pattern has bounded lookahead: the time is linear in the length for any content.
    """
    end = relevant_output(tail)
    of_a_gpu = any(_is_about_a_gpu(line) for line in end.split("\n"))
    is_sure = of_a_gpu or _SURE.search(end) is not None
    # The size may be in a log line above.
    return MemoryErrors(is_sure, _LIKELY.search(end) is not None, _lacking(end) or _lacking(tail))


def _is_about_a_gpu(line: str) -> bool:
    """Tell whether a line reports a lack of memory on a device that is not the CPU."""
    last = line.rfind(_OTHER_DEVICE)
    return _ON_A_DEVICE.search(line, last + 1) is not None


def diagnose_oom(
    exit_: Exit | None, errors: MemoryErrors, peak: int | None, leased: int
) -> OutOfMemory | None:
    """Return that a job ran out of GPU memory, or None.

    Args:
        exit_: how its main process ended; a successful one did not run out.
        errors: what the end of its output shows.
        peak: the highest observed use, in bytes, on the GPU where it used most.
        leased: the bytes leased there.
    """
    if exit_ is None or (exit_.code in (0, None) and exit_.signal is None):
        return None
    near = peak is not None and peak * 100 >= leased * _NEAR_PERCENT
    if errors.is_sure or (near and errors.is_likely):
        return OutOfMemory(errors.lacking)
    return None


def _lacking(tail: str) -> int | None:
    """Return the last size in the tail that could not be allocated."""
    found = _TRIED.findall(tail)
    if not found:
        return None
    number, *unit = (each for each in found[-1] if each)
    factor = _UNITS[unit[0].removesuffix("iB")] if unit else 1
    size = int(float(number.replace(",", "")) * factor)
    return size if 0 < size <= _LARGEST else None
