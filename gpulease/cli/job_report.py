"""The GPUs of a job, and what it did with them: `run --verbose`, `--summary`, `show`."""

from __future__ import annotations

from datetime import timedelta

from gpulease.drawing.words import clean, id_of, instant, size
from gpulease.units import format_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpulease.wire.jobs import DeviceView, JobView

_STAND_IN = "; the name is TensorFlow's: CPU devices stand in for simulated GPUs"


def device_lines(job: JobView) -> Iterator[str]:
    """Yield a line for each GPU of a job: its names in frameworks, and what it is."""
    for device in job.devices:
        yield f"gpulease: {names_of(device)} -> {clean(device.gpu)}, {what_is(device)}"


def is_simulated(job: JobView) -> bool:
    """Tell whether the GPUs of a job are simulated."""
    return any(each.simulated for each in job.devices)


def names_of(device: DeviceView) -> str:
    """Write the names that frameworks give a GPU."""
    return clean(", ".join(device.names))


def what_is(device: DeviceView) -> str:
    """Write the model of a GPU and its PCI address."""
    bus = f", bus {clean(device.bus)}" if device.bus else ""
    return f"{clean(device.name)}{bus}{_STAND_IN if device.simulated else ''}"


def summary_line(job: JobView) -> str:
    """Say in one line what an ended job did with its GPUs, as far as that is known."""
    known = "; ".join(text for text in _activity(job) if text)
    return f"gpulease: summary of job {id_of(job)}: {known or 'no use of a GPU was seen'}"


def _activity(job: JobView) -> Iterator[str | None]:
    pools = [pool.peak for lease in job.leases for pool in lease.pools if pool.peak]
    yield f"pool peak {size(max(pools))}" if pools else None
    peaks = [(lease.peak, lease.memory) for lease in job.leases if lease.peak is not None]
    if peaks:
        peak, memory = max(peaks)
        yield f"GPU peak {size(peak)} of {size(memory)}"
    yield f"mean utilization {utilization(job)}" if utilization(job) else None
    yield f"first use of a GPU {first_use(job)}" if first_use(job) else None
    yield steps(job)
    yield f"next time --mem {size(job.advised)}" if job.advised else None


def utilization(job: JobView) -> str | None:
    """Write the mean utilization of the GPUs of a job."""
    return None if job.utilization is None else f"{job.utilization}%"


def first_use(job: JobView) -> str | None:
    """Write when a job first used a GPU."""
    if job.first_use_at is None or job.started_at is None:
        return None
    after = instant(job.first_use_at) - instant(job.started_at)
    return f"{format_span(max(after, timedelta(0)))} after the start"


def steps(job: JobView) -> str | None:
    """Write how many training steps a job made, and how fast."""
    if not job.steps:
        return None
    rate = job.steps_per_second
    return f"{job.steps} steps" + ("" if rate is None else f", {rate:.3g} per second")
