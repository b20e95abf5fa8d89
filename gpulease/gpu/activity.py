"""Reads which processes on a GPU computed of late, where the driver tells them apart.

It is asked only where the figure for the whole GPU leaves the question open: something computes,
and there are several processes.

Sources: NVML's reference for nvmlDeviceGetProcessUtilization; the threads rust-nvml/nvml-wrapper
#56 (no samples are told as an error) and Syllo/nvtop #110 (records of nonsense on some drivers).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpulease.domain.memory import ProcessReading
from gpulease.gpu import binding
from gpulease.gpu.binding import Handle

_ALL_SAMPLES = 0
"""All that the driver still keeps, of seconds to a minute: who computed then is not idle yet."""
_FIGURES = ("smUtil", "memUtil", "encUtil", "decUtil")


def told_apart(
    handle: Handle, processes: Sequence[ProcessReading], utilization: int | None
) -> tuple[ProcessReading, ...]:
    """Return `processes` with how busy each was, in percent; as they are where there is no telling.

    `utilization` is the one of the whole GPU.
    """
    if not utilization or len(processes) < 2:
        return tuple(processes)
    samples = binding.ask_or_none("nvmlDeviceGetProcessUtilization", handle, _ALL_SAMPLES)
    if not samples or not all(_is_sane(sample) for sample in samples):
        return tuple(processes)
    busy: dict[int, int] = {}
    for sample in samples:
        most = max(int(getattr(sample, figure)) for figure in _FIGURES)
        busy[int(sample.pid)] = max(most, busy.get(int(sample.pid), 0))
    # There are samples only of those that computed at some time. Where they are not who is listed,
    # as in other pid namespaces, nothing says that those who are listed did not.
    listed = {process.pid for process in processes}
    if not any(busy.values()) or any(share and pid not in listed for pid, share in busy.items()):
        return tuple(processes)
    return tuple(replace(process, utilization=busy.get(process.pid, 0)) for process in processes)


def _is_sane(sample: Any) -> bool:
    return int(sample.pid) > 0 and all(int(getattr(sample, each)) <= 100 for each in _FIGURES)
