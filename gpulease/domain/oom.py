"""Tell by the end of a job's output whether it ended because GPU memory did not do. Pure.

The sentences are those of the frameworks: TensorFlow's BFC allocator and kernels, PyTorch's caching
allocator, XLA, CuPy, the CUDA runtime, and the libraries that allocate by themselves.

What the end of an output tells of why a program ended, where that is a Python traceback. Pure.

A program may have met an error before, said so, and gone on: the last exception decides, with those
that it came from. The sentences are those of Python's own module `traceback`.
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
_FRAMEWORKS = frozenset({"tensorflow", "keras", "torch", "jax", "jaxlib", "cupy", "numba"})
"""Their errors may follow from one that was only logged, as cuDNN's from a full GPU."""
_OF_OTHERS = frozenset(
    {"subprocess", "multiprocessing", "concurrent", "ray"}
    | {"KeyboardInterrupt", "EOFError", "BrokenPipeError", "ConnectionResetError"}
)
"""What is raised in one process because of another, which has said why."""
_UNCLEAR = frozenset({"RuntimeError", "SystemError", "OSError"})
_SPEAKS_OF_A_GPU = ("cuda", "cudnn", "cublas", "cufft", "nccl", "gpu", "device", "worker", "memory")
_PROCESS = "Process "
"""With its name and a colon: the line that `multiprocessing` writes before a traceback."""


def deciding(text: str) -> str:
    """Return the part of an output from which it can be told why the program ended.

    All of it, unless it has a traceback whose exception is the program's own and no framework's:
    then from the first one on that this came from.
    """
    lines = [line.rstrip("\r") for line in text.split("\n")]
    begins = [place for place, line in enumerate(lines) if line == _BEGINS]
    if not begins or _is_of_several(lines, begins):
        return text
    said = next((line for line in lines[begins[-1] + 1 :] if line[:1].strip()), "")
    if not said or _may_follow_from_another(said):
        return text
    first = len(begins) - 1
    while first > 0 and _is_chained(lines, begins[first - 1], begins[first]):
        first -= 1
    return "\n".join(lines[begins[first] :])


def _is_of_several(lines: Sequence[str], begins: Sequence[int]) -> bool:
    """Tell whether some traceback is that of a child of `multiprocessing`."""
    before = (lines[place - 1] for place in begins if place > 0)
    return any(line.startswith(_PROCESS) and line.endswith(":") for line in before)


def _may_follow_from_another(said: str) -> bool:
    """Tell whether an exception may come of an error that was told before, and not with it."""
    name, _, message = said.partition(":")
    if name.partition(".")[0] in _FRAMEWORKS | _OF_OTHERS:
        return True
    return name in _UNCLEAR and any(word in message.lower() for word in _SPEAKS_OF_A_GPU)


def _is_chained(lines: Sequence[str], before: int, begin: int) -> bool:
    """Tell whether the traceback that begins at `begin` says that it came of the one `before`."""
    between = [line for line in lines[before + 1 : begin] if line]
    return bool(between) and between[-1] in _CHAINED


_SAID = re.compile(
    r"failed to allocate [^\n]{0,200}out of memory"
    r"|torch\.(?:cuda\.)?OutOfMemoryError"
    r"|CUDA out of memory\. Tried to allocate|CUDA error: out of memory"
    r"|rejected because it would exceed per_process_memory_fraction limit"
    r"|RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)"
    r"|cupy\.cuda\.memory\.OutOfMemoryError"
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
)
"""What nothing but a GPU that is full says."""
_SAID_OF_A_DEVICE = re.compile(r"OOM when allocating tensor|ResourceExhaustedError")
"""What TensorFlow says, and after it in the same line of which device."""
_OTHER_DEVICE = "device:CPU"
_HINTED = re.compile(r"out of memory|std::bad_alloc|cannot allocate memory", re.IGNORECASE)
"""What the machine's own memory may say as well."""

_NUMBER = r"([0-9][0-9,]{0,20}(?:\.[0-9]{1,6})?)"
_TRIED = re.compile(
    rf"Tried to allocate {_NUMBER} ?(KiB|MiB|GiB)"
    rf"|trying to allocate {_NUMBER} ?(bytes|KiB|MiB|GiB)"
    rf"|Out of memory allocating {_NUMBER} (bytes)"
    rf"|failed to allocate {_NUMBER}(K|M|G|KiB|MiB|GiB) "
    rf"|memory_fraction limit\. Requested size: {_NUMBER}(?: ?(bytes|KiB|MiB|GiB))?"
)
_UNITS = {"bytes": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 40
_NEAR_PERCENT = 80


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A job ran out of GPU memory; `lacking` is what it could not get, in bytes, if it said."""

    lacking: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """What the end of an output says of memory."""

    is_sure: bool = False
    """It is a GPU's memory."""
    is_likely: bool = False
    """It is a GPU's memory, or the machine's."""
    lacking: int | None = None


NO_MEMORY_ERRORS = MemoryErrors()


def find_memory_errors(tail: str) -> MemoryErrors:
    """Return what the end of an output, both streams, says of memory.

    What was said before the exception that ended a program counts if that may come of it.

    The output is a user's, so each pattern looks a bounded way ahead: whatever was written, this
    takes time by its length alone.
    """
    end = deciding(tail)
    of_a_gpu = any(_is_said_of_a_gpu(line) for line in end.split("\n"))
    is_sure = of_a_gpu or _SAID.search(end) is not None
    # How much was lacking may stand in a log line above.
    return MemoryErrors(is_sure, _HINTED.search(end) is not None, _lacking(end) or _lacking(tail))


def _is_said_of_a_gpu(line: str) -> bool:
    """Tell whether a line complains and names no other device after that."""
    last = line.rfind(_OTHER_DEVICE)
    return _SAID_OF_A_DEVICE.search(line, last + 1) is not None


def diagnose_oom(
    exit_: Exit | None, complaint: MemoryErrors, peak: int | None, leased: int
) -> OutOfMemory | None:
    """Return that a job ended for want of GPU memory, or None.

    Args:
        exit_: how its main process ended; one that ended well had memory enough.
        complaint: what it wrote last.
        peak: the most that it was seen to use on the GPU where it used most, in bytes.
        leased: what it had there.
    """
    if exit_ is None or (exit_.code in (0, None) and exit_.signal is None):
        return None
    near = peak is not None and peak * 100 >= leased * _NEAR_PERCENT
    if complaint.is_sure or (near and complaint.is_likely):
        return OutOfMemory(complaint.lacking)
    return None


def _lacking(tail: str) -> int | None:
    """Return the last size that the tail complains about."""
    found = _TRIED.findall(tail)
    if not found:
        return None
    number, *unit = (each for each in found[-1] if each)
    factor = _UNITS[unit[0].removesuffix("iB")] if unit else 1
    size = int(float(number.replace(",", "")) * factor)
    return size if 0 < size <= _LARGEST else None
