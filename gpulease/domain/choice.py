"""Which GPUs a claim asks for: by name, by model, by size; and several of one model.

What is free on them does not matter here.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

from gpulease.domain.gpu import GpuReading
from gpulease.domain.lease import Claim
from gpulease.units import format_size

T = TypeVar("T")

_USABLE = 0.92
"""The least part of the memory in the name of a GPU that its driver reports as the total.

ECC takes a sixteenth on cards with GDDR memory, and the driver some more: an "A10 24GB" reports
22.2 GiB. No two sizes that are sold are as close as that.
"""


def suits(claim: Claim, gpu: GpuReading) -> bool:
    """Tell whether a GPU is one that `claim` asks for."""
    return _is_named(claim, gpu) and _is_model(claim, gpu) and _is_large_enough(claim, gpu)


def why_unsuitable(claim: Claim, gpu: GpuReading) -> str | None:
    """Return why a GPU is not one that `claim` asks for; None if it is."""
    if not _is_named(claim, gpu):
        return "it is not one of the GPUs asked for"
    if not _is_model(claim, gpu):
        return f"its model is {gpu.name}, not {claim.model}"
    if not _is_large_enough(claim, gpu):
        return f"it has {format_size(gpu.total or 0)}, less than {format_size(claim.min_vram or 0)}"
    return None


def _is_named(claim: Claim, gpu: GpuReading) -> bool:
    # The name of a GPU that MIG divides stands for its MIG devices.
    return not claim.named or gpu.uuid in claim.named or gpu.parent in claim.named


def _is_model(claim: Claim, gpu: GpuReading) -> bool:
    return claim.model is None or is_model(claim.model, gpu.name)


@lru_cache(maxsize=1024)
def is_model(wanted: str, name: str) -> bool:
    """Tell whether the name of a GPU has the wanted words: A10 is in "NVIDIA A10", not in "A100".

    Upper and lower case are the same.
    """
    words = rf"(?<![^\W_]){re.escape(wanted.strip())}(?![^\W_])"
    return re.search(words, name, re.IGNORECASE) is not None


def _is_large_enough(claim: Claim, gpu: GpuReading) -> bool:
    """Tell whether a GPU has the wanted size; a size that is not known now counts as enough."""
    return claim.min_vram is None or gpu.total is None or gpu.total >= claim.min_vram * _USABLE


def sets_of(
    claim: Claim, gpus: Iterable[T], reading: Callable[[T], GpuReading]
) -> Mapping[Hashable, list[T]]:
    """Return the sets of GPUs that a job may have together: of one server, perhaps of one model."""
    found: dict[Hashable, list[T]] = {}
    for gpu in gpus:
        read = reading(gpu)
        key = (read.server, read.name) if claim.same_model else read.server
        found.setdefault(key, []).append(gpu)
    return found
