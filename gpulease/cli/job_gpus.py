"""The GPUs of a job, and what it did with them: `run --verbose`, `--summary`, `show`."""

from __future__ import annotations

from datetime import timedelta

from gpulease.cli.tables import Block, Column, Hanging, Table, line
from gpulease.drawing.endings import cpu_time, steps
from gpulease.drawing.words import amount, clean, id_of, instant, size
from gpulease.units import format_span
from gpulease.wire.text import leased

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
    peaks = [(lease.peak, leased(lease)) for lease in job.leases if lease.peak is not None]
    if peaks:
        peak, memory = max(peaks)
        yield f"GPU peak {size(peak)} of {memory}"
    yield f"mean utilization {utilization(job)}" if utilization(job) else None
    yield f"RAM peak {size(job.ram_peak)}" if job.ram_peak is not None else None
    yield f"CPU time {cpu_time(job)}" if cpu_time(job) else None
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


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpulease.wire.jobs import DeviceView, HookView, JobView, LeaseView

_SHORT_UUID = len("GPU-12345678")


def gpu_of(uuid: str, indexes: Mapping[str, str]) -> str:
    """Write a GPU by its index and its UUID; by its UUID alone if the index is unknown."""
    return uuid if uuid not in indexes else f"GPU {indexes[uuid]} ({uuid[:_SHORT_UUID]})"


def links(job: JobView, indexes: Mapping[str, str]) -> str | None:
    """Write how the GPUs of a job are linked: GPUs 0 and 2, NVLink x4; None without NVLink."""
    if job.nvlinks is None:
        return None
    *most, last = [clean(indexes.get(lease.gpu, lease.gpu)) for lease in job.leases]
    gpus = f"GPUs {', '.join(most)} and {last}"
    if not job.nvlinks:
        return f"{gpus}, not each two linked by NVLink"
    return f"{gpus}, NVLink x{job.nvlinks}{' or more' if len(most) > 1 else ''}"


def lease_table(job: JobView, indexes: Mapping[str, str]) -> Iterator[Block]:
    """Lay out the leases of a job: sizes, use, and what enforces them."""
    if not job.leases:
        return
    runs = job.state != "ended"
    columns = (
        Column("GPU", wraps=True, least=20),
        Column("LEASED", right=True),
        *([Column("USED", right=True)] if runs else []),
        Column("PEAK", right=True),
        Column("ENFORCED BY", leaves=1, wraps=True, below="enforced by: "),
    )
    rows = (
        (
            line(gpu_of(clean(lease.gpu), indexes)),
            line(leased(lease)),
            *([line(amount(lease.used))] if runs else []),
            line(amount(lease.peak)),
            line(_enforcement(lease)),
        )
        for lease in job.leases
    )
    yield line("")
    yield Table(columns, tuple(rows))


def _enforcement(lease: LeaseView) -> str:
    """Name the levels that enforce a lease, and the limit that the driver keeps to."""
    limit = lease.driver_limit
    driver = "driver" if limit is None else f"driver ({size(limit)})"
    names = (driver if each == "driver" else clean(each) for each in lease.enforced_by)
    return ", ".join(names) or "nothing"


def hook_table(job: JobView, indexes: Mapping[str, str]) -> Iterator[Block]:
    """Lay out which frameworks are limited in which processes, which are not, and why."""
    shown = {each.pid for each in job.unheld}
    rows = [
        (
            line(str(each.pid)),
            line(" ".join(clean(part) for part in (each.framework, each.version) if part) or "-"),
            line(_hook(each, indexes), "" if each.state == "limited" else "warn"),
        )
        for each in job.hooks
        # On simulated GPUs no framework is limited, which the page says once for all of them.
        if not (each.limits and all(limit.limit is None for limit in each.limits))
        # A process that still runs without the hook has a line below.
        and (each.state != "absent" or each.pid not in shown)
    ]
    if not rows:
        return
    columns = (
        Column("PROCESS", right=True),
        Column("FRAMEWORK", wraps=True),
        Column("HOOK", wraps=True, least=24, leaves=1, below=""),
    )
    yield line("")
    yield Table(columns, tuple(rows))


def _hook(hook: HookView, indexes: Mapping[str, str]) -> str:
    if hook.state != "limited":
        return f"not limited: {clean(hook.why or 'the reason is unknown')}"
    limits = [
        ("" if each.limit is None else f"to {size(each.limit)} ")
        + f"on {gpu_of(clean(each.gpu), indexes)}"
        for each in hook.limits
    ]
    return f"limited {', '.join(limits)}" if limits else "sees no GPU"


def unhooked_lines(job: JobView) -> Iterator[Block]:
    """Name the processes on a GPU that the framework hook does not reach."""
    for each in job.unheld:
        process = f"process {each.pid} ({clean(each.command)})"
        text = f"{process} is not limited by the framework hook: {clean(each.why)}"
        yield Hanging(line(text, "warn"), 2)


def device_table(job: JobView) -> Iterator[Block]:
    """Lay out which GPU each device name of the frameworks is."""
    if not job.devices:
        return
    columns = (
        Column("DEVICE", wraps=True, least=14),
        Column("GPU", wraps=True, least=20),
    )
    rows = (
        (line(names_of(each)), line(f"{clean(each.gpu)}, {what_is(each)}")) for each in job.devices
    )
    yield line("")
    yield Table(columns, tuple(rows))


def pool_table(job: JobView, indexes: Mapping[str, str]) -> Iterator[Block]:
    """Lay out the memory pools of frameworks, and the memory outside them."""
    rows = [
        (
            line(gpu_of(clean(lease.gpu), indexes)),
            line(f"{clean(pool.framework)} {clean(pool.version)}"),
            line(size(pool.limit)),
            line(amount(pool.peak)),
            line(amount(pool.charged)),
            line(amount(pool.beside)),
        )
        for lease in job.leases
        for pool in lease.pools
        if pool.limit is not None or pool.peak
    ]
    if not rows:
        return
    columns = (
        Column("GPU", wraps=True, least=20),
        Column("POOL OF", wraps=True),
        Column("LIMIT", right=True, leaves=3, below="limit: "),
        Column("PEAK", right=True),
        Column("RESERVED OUTSIDE", right=True, leaves=2, below="reserved outside: "),
        Column("USED OUTSIDE", right=True, leaves=1, below="used outside: "),
    )
    yield line("")
    yield Table(columns, tuple(rows))
