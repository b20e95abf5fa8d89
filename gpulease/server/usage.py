"""What a hook in a job reports, checked against every bound; and how what is known is shown.

It is the word of the job's owner: nothing here is believed beyond being a number of its kind.
"""

from gpulease.domain.lease import Lease
from gpulease.domain.memory import GpuUuid
from gpulease.errors import BadValue
from gpulease.server.fields import printable
from gpulease.service.usage import PoolReport, PoolSeen, Report
from gpulease.wire import PoolUsage, PoolView, UsageRequest

FRAMEWORKS = frozenset({"tensorflow", "torch", "jax", "cupy"})
_MOST_GPUS = 64
_LARGEST = 1 << 50
_LONGEST_VERSION = 40
_LONGEST_UUID = 96


def report_of(request: UsageRequest) -> Report:
    """Return what a hook reports.

    Raises:
        BadValue: it is none.
    """
    if request.framework not in FRAMEWORKS or len(request.gpus) > _MOST_GPUS:
        raise BadValue("cannot read the report: of no framework that is known, or of too many GPUs")
    version = printable(request.version[:_LONGEST_VERSION])
    return Report(request.framework, version, tuple(_pool(each) for each in request.gpus))


def _pool(given: PoolUsage) -> PoolReport:
    for size in (given.pool, given.peak, given.limit):
        if size is not None and not 0 <= size <= _LARGEST:
            raise BadValue("cannot read the report: a size in it is out of range")
    uuid = GpuUuid(given.gpu[:_LONGEST_UUID])
    return PoolReport(uuid, given.pool, given.peak, given.limit)


def pool_view(seen: PoolSeen, lease: Lease) -> PoolView:
    """Return what is known of a pool in a lease as a wire object."""
    charged = None if seen.limit is None else max(0, lease.memory - seen.limit)
    return PoolView(
        framework=seen.kind.framework,
        version=seen.version,
        limit=seen.limit,
        peak=seen.peak,
        charged=charged,
        beside=seen.beside,
    )
