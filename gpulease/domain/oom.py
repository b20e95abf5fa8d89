"""Tell by the end of a job's output whether it ended because GPU memory did not do. Pure.

The sentences are those of the frameworks: TensorFlow's BFC allocator and kernels, PyTorch's caching
allocator, XLA, CuPy, the CUDA runtime, and the libraries that allocate by themselves.
"""

import re
from dataclasses import dataclass

from gpulease.domain.job import Exit

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
class Complaint:
    """What the end of an output says of memory."""

    is_sure: bool = False
    """It is a GPU's memory."""
    is_likely: bool = False
    """It is a GPU's memory, or the machine's."""
    lacking: int | None = None


NO_COMPLAINT = Complaint()


def complaint_in(tail: str) -> Complaint:
    """Return what the end of an output, both streams, says of memory.

    The output is a user's, so each pattern looks a bounded way ahead: whatever was written, this
    takes time by its length alone.
    """
    of_a_gpu = any(_is_said_of_a_gpu(line) for line in tail.split("\n"))
    is_sure = of_a_gpu or _SAID.search(tail) is not None
    return Complaint(is_sure, _HINTED.search(tail) is not None, _lacking(tail))


def _is_said_of_a_gpu(line: str) -> bool:
    """Tell whether a line complains and names no other device after that."""
    last = line.rfind(_OTHER_DEVICE)
    return _SAID_OF_A_DEVICE.search(line, last + 1) is not None


def recognised(
    exit_: Exit | None, complaint: Complaint, peak: int | None, leased: int
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
