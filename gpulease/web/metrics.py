"""The metrics for Prometheus, in its text format and as OpenMetrics: one table of all of them.

Names and units follow the conventions of Prometheus: base units, `_total` on counters, no label
without bound. What is unknown has no sample.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from gpulease.client import Client
from gpulease.drawing.words import index_of
from gpulease.errors import NoDaemon
from gpulease.units import MIB
from gpulease.web.daemon_reader import DaemonReader
from gpulease.wire.jobs import JobView, LeaseView
from gpulease.wire.machine import GpuState, GpuView, StatusView
from gpulease.wire.metrics import HistogramView, MetricsView, UserMetricsView

Samples = Iterable[tuple[tuple[str, ...], float | None]]
"""Values with those of their labels."""
Histograms = dict[tuple[str, ...], HistogramView]
"""By the values of their labels."""

_OTHER = "other"
_UNITS: Final = frozenset({"bytes", "seconds", "celsius", "watts", "ratio"})


@dataclass(frozen=True, slots=True)
class Seen:
    """What one scrape shows."""

    status: StatusView
    counted: MetricsView

    def leases(self) -> Iterator[tuple[str, JobView, LeaseView]]:
        """Yield the leases that are held, each with its user as a label.

        The daemon counts the users after the first ones together.
        """
        known = {each.user for each in self.counted.users}
        for job in self.status.jobs:
            user = job.user if job.user in known else _OTHER
            for lease in job.leases:
                yield user, job, lease


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of the table."""

    name: str
    labels: tuple[str, ...]
    meaning: str
    samples: Callable[[Seen], Samples | Histograms]
    kind: Literal["gauge", "counter", "histogram", "info"] = "gauge"
    by_job: bool = False
    """Only where metrics by job were asked for: their labels grow without bound."""

    @property
    def unit(self) -> str:
        """The base unit; empty for a number."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in _UNITS else ""

    def family(self, seen: Seen) -> Metric:
        """Return the samples as the library wants them."""
        found = self.samples(seen)
        if isinstance(found, dict):
            counted = HistogramMetricFamily(
                self.name, self.meaning, labels=self.labels, unit=self.unit
            )
            for values, each in found.items():
                counted.add_metric(values, _buckets(each), each.sum)
            return counted
        if self.kind == "info":
            return self._info(found)
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = made(self.name, self.meaning, labels=self.labels, unit=self.unit)
        for values, value in found:
            if value is not None:
                family.add_metric(values, value)
        return family

    def _info(self, found: Samples) -> InfoMetricFamily:
        family = InfoMetricFamily(self.name.removesuffix("_info"), self.meaning)
        for values, _ in found:
            family.add_metric([], dict(zip(self.labels, values, strict=True)))
        return family


def _buckets(view: HistogramView) -> list[tuple[str, float]]:
    """Return the counts of each bucket and those below it, as Prometheus counts."""
    below, buckets = 0, []
    for bound, count in zip([*map(str, view.bounds), "+Inf"], view.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return buckets


def _seconds(instant: str | None) -> float | None:
    """Return an instant in seconds since 1970."""
    return None if instant is None else datetime.fromisoformat(instant).timestamp()


_GPU = ("gpu", "uuid")
_USER = ("user",)


def _ids(gpu: GpuView) -> tuple[str, str]:
    return index_of(gpu), gpu.uuid


def _of_gpu(value: Callable[[GpuView], float | None]) -> Callable[[Seen], Samples]:
    return lambda seen: ((_ids(gpu), value(gpu)) for gpu in seen.status.gpus)


def _of_user(value: Callable[[UserMetricsView], float]) -> Callable[[Seen], Samples]:
    return lambda seen: (((each.user,), value(each)) for each in seen.counted.users)


def _one(value: Callable[[Seen], float | None]) -> Callable[[Seen], Samples]:
    return lambda seen: [((), value(seen))]


def _waits(seen: Seen) -> Histograms:
    return {(it.user,): it.waits for it in seen.counted.users if it.waits is not None}


def _whole(value: Callable[[Seen], HistogramView]) -> Callable[[Seen], Histograms]:
    return lambda seen: {(): value(seen)}


def _oldest_wait_s(seen: Seen) -> float:
    since, now = _seconds(seen.counted.oldest_queued_at), _seconds(seen.counted.at)
    return 0.0 if since is None or now is None else max(0.0, now - since)


def _states(seen: Seen) -> Samples:
    for gpu in seen.status.gpus:
        for state in get_args(GpuState):
            yield (*_ids(gpu), state), float(gpu.state == state)


def _faults(seen: Seen) -> Samples:
    ids = {gpu.uuid: _ids(gpu) for gpu in seen.status.gpus}
    for each in seen.counted.faults:
        yield (*ids.get(each.gpu, ("", each.gpu)), each.kind, each.cause), each.count


def _jobs(seen: Seen) -> Samples:
    return (((it.user, state), n) for it in seen.counted.users for state, n in it.jobs.items())


def _ended(seen: Seen) -> Samples:
    return (((it.user, how), n) for it in seen.counted.users for how, n in it.ended.items())


def _by_holder(value: Callable[[LeaseView], int | None]) -> Callable[[Seen], Samples]:
    """Return the sum over the leases of each user; unknown if one of them is."""

    def sums(seen: Seen) -> Samples:
        found: dict[str, int | None] = {each.user: 0 for each in seen.counted.users}
        for user, _, lease in seen.leases():
            sum_, amount = found.get(user, 0), value(lease)
            found[user] = None if sum_ is None or amount is None else sum_ + amount
        return (((user,), number) for user, number in found.items())

    return sums


def _by_job(value: Callable[[LeaseView], int | None]) -> Callable[[Seen], Samples]:
    def each(seen: Seen) -> Samples:
        ids = {gpu.uuid: _ids(gpu) for gpu in seen.status.gpus}
        for user, job, lease in seen.leases():
            where = ids.get(lease.gpu, ("", lease.gpu))
            yield (job.label or str(job.id), user, *where), value(lease)

    return each


UP = Row(
    "gpulease_daemon_up",
    (),
    "Whether the daemon answered this scrape. If it did not, this is the only sample.",
    _one(lambda _: 1.0),
)
TABLE: Final = (
    UP,
    Row(
        "gpulease_build_info", ("version",), "The version of the daemon.",
        lambda seen: [((seen.counted.version,), 1.0)], "info",
    ),
    Row(
        "gpulease_driver_info", ("version",), "The version of the NVIDIA driver.",
        lambda seen: [((seen.status.driver,), 1.0)] if seen.status.driver else [], "info",
    ),
    # GPUs.
    Row(
        "gpulease_gpu_info", (*_GPU, "name"), "The model of the GPU.",
        lambda seen: [((*_ids(gpu), gpu.name), 1.0) for gpu in seen.status.gpus], "info",
    ),
    Row(
        "gpulease_gpu_state", (*_GPU, "state"),
        "1 for the state that the GPU is in, 0 for the others. `drained` takes no new lease.",
        _states,
    ),
    Row(
        "gpulease_gpu_memory_total_bytes", _GPU, "Memory of the GPU.",
        _of_gpu(lambda gpu: gpu.memory.total),
    ),
    Row(
        "gpulease_gpu_memory_allocatable_bytes", _GPU,
        "What can be leased: all memory, less what the driver reserves and the margin.",
        _of_gpu(lambda gpu: gpu.memory.allocatable),
    ),
    Row(
        "gpulease_gpu_memory_leased_bytes", _GPU, "The leases on the GPU.",
        _of_gpu(lambda gpu: gpu.memory.leased),
    ),
    Row(
        "gpulease_gpu_memory_committed_bytes", _GPU,
        "The leases on the GPU, each with what is used of it if that is more.",
        _of_gpu(lambda gpu: gpu.memory.committed),
    ),
    Row(
        "gpulease_gpu_memory_used_bytes", _GPU, "Memory in use, by jobs and others.",
        _of_gpu(lambda gpu: gpu.memory.used),
    ),
    Row(
        "gpulease_gpu_memory_unmanaged_bytes", _GPU, "Memory in use outside any lease.",
        _of_gpu(lambda gpu: gpu.memory.unmanaged),
    ),
    Row(
        "gpulease_gpu_memory_headroom_bytes", _GPU,
        "What can be leased now; 0 on a drained GPU.",
        _of_gpu(lambda gpu: gpu.memory.headroom),
    ),
    Row(
        "gpulease_gpu_utilization_ratio", _GPU, "Share of time in which the GPU was busy, 0 to 1.",
        _of_gpu(lambda gpu: None if gpu.utilization is None else gpu.utilization / 100),
    ),
    Row(
        "gpulease_gpu_temperature_celsius", _GPU, "Temperature of the GPU.",
        _of_gpu(lambda gpu: gpu.temperature),
    ),
    Row(
        "gpulease_gpu_power_watts", _GPU, "Power that the GPU draws.",
        _of_gpu(lambda gpu: gpu.power),
    ),
    Row(
        "gpulease_gpu_power_limit_watts", _GPU, "The most power that the GPU may draw.",
        _of_gpu(lambda gpu: gpu.power_limit),
    ),
    Row(
        "gpulease_gpu_faults_total", (*_GPU, "kind", "cause"),
        "Faults by `kind`: XIDs, memory errors, a lost GPU. `cause` is `hardware` for what drains "
        "a GPU, and `application` for faults of programs.",
        _faults, "counter",
    ),
    # Jobs and leases.
    Row("gpulease_jobs", ("user", "state"), "Jobs that are queued or hold memory.", _jobs),
    Row(
        "gpulease_queue_length", (), "Queued jobs.",
        _one(lambda seen: sum(each.jobs.get("queued", 0) for each in seen.counted.users)),
    ),
    Row(
        "gpulease_queue_oldest_wait_seconds", (),
        "For how long the oldest queued job has waited that may start; 0 if there is none.",
        _one(_oldest_wait_s),
    ),
    Row(
        "gpulease_user_memory_queued_bytes", _USER,
        "What queued jobs ask for, on all their GPUs, without those that may not start yet: held, "
        "before their time, after other jobs, or while their array runs enough.",
        _of_user(lambda it: it.queued_memory),
    ),
    Row(
        "gpulease_user_gpus_queued", _USER, "The GPUs that these jobs ask for.",
        _of_user(lambda it: it.queued_gpus),
    ),
    Row(
        "gpulease_queue_closed", (),
        "Whether no job can start now: a pause, a shutdown, a missing device node.",
        _one(lambda seen: float(seen.status.closed is not None)),
    ),
    Row(
        "gpulease_queue_paused", (), "Whether an admin has paused the queue.",
        _one(lambda seen: float(seen.status.paused is not None)),
    ),
    Row(
        "gpulease_jobs_submitted_total", _USER,
        "Submitted jobs, without those that continue an earlier one.",
        _of_user(lambda it: it.submitted), "counter",
    ),
    Row(
        "gpulease_jobs_requeued_total", _USER,
        "Jobs that continue an earlier one, which was queued again or retried.",
        _of_user(lambda it: it.requeued), "counter",
    ),
    Row(
        "gpulease_jobs_started_total", _USER, "Jobs that were started.",
        _of_user(lambda it: it.started), "counter",
    ),
    Row(
        "gpulease_jobs_ended_total", ("user", "outcome"),
        "Jobs that ended, by `outcome` as in `gpulease show --json`.", _ended, "counter",
    ),
    Row(
        "gpulease_jobs_failed_total", _USER,
        "Jobs that failed, as in `gpulease history --state failed`: any end without success, but "
        "for those that somebody asked for (cancelled, released, preempted, requeued).",
        _of_user(lambda it: it.failed), "counter",
    ),
    Row(
        "gpulease_jobs_out_of_memory_total", _USER, "Jobs that ran out of GPU memory.",
        _of_user(lambda it: it.out_of_memory), "counter",
    ),
    Row(
        "gpulease_job_wait_seconds", _USER,
        "Time from the submission of a job to the grant of its leases.",
        _waits, "histogram",
    ),
    Row(
        "gpulease_leases_over_limit", _USER, "Leases that are exceeded now.",
        _by_holder(lambda lease: int(lease.over_since_at is not None)),
    ),
    Row(
        "gpulease_lease_overruns_total", _USER, "How often a lease was exceeded.",
        _of_user(lambda it: it.over_lease), "counter",
    ),
    Row(
        "gpulease_user_memory_leased_bytes", _USER, "The leases of the user.",
        _by_holder(lambda lease: lease.memory),
    ),
    Row(
        "gpulease_user_memory_used_bytes", _USER,
        "Memory that the jobs of the user use; no sample if it is unknown for one of them.",
        _by_holder(lambda lease: lease.used),
    ),
    Row(
        "gpulease_leased_gpu_seconds_total", _USER,
        "Time for which leases were held, summed over GPUs.",
        _of_user(lambda it: it.gpu_seconds), "counter",
    ),
    Row(
        "gpulease_leased_byte_seconds_total", _USER,
        "The same times the leased bytes: divide by 2^30 x 3600 for GiB hours.",
        _of_user(lambda it: it.byte_seconds), "counter",
    ),
    Row(
        "gpulease_jobs_cpu_seconds_total", _USER, "CPU time of jobs that have ended.",
        _of_user(lambda it: it.cpu_seconds), "counter",
    ),
    # The daemon.
    Row(
        "gpulease_daemon_start_time_seconds", (), "When the daemon started: counters begin then.",
        _one(lambda seen: _seconds(seen.counted.started_at)),
    ),
    Row(
        "gpulease_daemon_last_observation_timestamp_seconds", (),
        "When the daemon last read the GPUs.",
        _one(lambda seen: _seconds(seen.counted.observed_at)),
    ),
    Row(
        "gpulease_daemon_cpu_seconds_total", (), "CPU time of the daemon.",
        _one(lambda seen: seen.counted.cpu_seconds), "counter",
    ),
    Row(
        "gpulease_daemon_resident_memory_bytes", (), "Memory of the daemon.",
        _one(lambda seen: seen.counted.resident),
    ),
    Row(
        "gpulease_daemon_connections", (), "Open connections to the daemon's socket.",
        _one(lambda seen: seen.counted.open_connections),
    ),
    Row(
        "gpulease_daemon_refused_connections_total", (),
        "Connections that were refused because their user had too many.",
        _one(lambda seen: seen.counted.refused_connections), "counter",
    ),
    Row(
        "gpulease_daemon_socket_errors_total", (),
        "Errors in accepting connections, such as too many open files.",
        _one(lambda seen: seen.counted.failed_connections), "counter",
    ),
    Row(
        "gpulease_scheduler_pass_duration_seconds", (),
        "Passes over the queue, with the observations that they wait for.",
        _whole(lambda seen: seen.counted.passes), "histogram",
    ),
    Row(
        "gpulease_scheduler_pass_failures_total", (), "Passes over the queue that failed.",
        _one(lambda seen: seen.counted.failed_passes), "counter",
    ),
    Row(
        "gpulease_database_commit_duration_seconds", (),
        "Commits of the database, with the flush to the disk.",
        _whole(lambda seen: seen.counted.commits), "histogram",
    ),
    Row(
        "gpulease_database_write_failures_total", (),
        "Writes that failed: a full disk, a locked or damaged database.",
        _one(lambda seen: seen.counted.failed_commits), "counter",
    ),
    Row(
        "gpulease_database_size_bytes", (), "The database with its log.",
        _one(lambda seen: seen.counted.database),
    ),
    # Notifications.
    Row(
        "gpulease_notifications_sent_total", (),
        "Notifications that all receivers of the user have.",
        _one(lambda seen: seen.counted.notifications_sent), "counter",
    ),
    Row(
        "gpulease_notifications_given_up_total", (),
        "Notifications that a receiver did not take after the last attempt.",
        _one(lambda seen: seen.counted.notifications_given_up), "counter",
    ),
    Row(
        "gpulease_notifications_waiting", (), "Notifications that are still to be sent.",
        _one(lambda seen: seen.counted.notifications_waiting),
    ),
    # By job.
    Row(
        "gpulease_job_memory_leased_bytes", ("job", "user", *_GPU), "The lease of a job.",
        _by_job(lambda lease: lease.memory), by_job=True,
    ),
    Row(
        "gpulease_job_memory_used_bytes", ("job", "user", *_GPU), "What a job uses of the GPU.",
        _by_job(lambda lease: lease.used), by_job=True,
    ),
)  # fmt: skip


_DCGM = ("gpu", "UUID", "device", "modelName", "Hostname")


def _as_dcgm(value: Callable[[GpuView], float | None]) -> Callable[[Seen], Samples]:
    """Return samples with the labels of DCGM-exporter; of a MIG device it has others."""
    return lambda seen: (
        ((index_of(gpu), gpu.uuid, f"nvidia{gpu.index}", gpu.name, seen.status.host), value(gpu))
        for gpu in seen.status.gpus
        if gpu.parent is None
    )


def _free(gpu: GpuView) -> int | None:
    total, used = gpu.memory.total, gpu.memory.used
    return None if total is None or used is None else total - used - (gpu.memory.reserved or 0)


def _mib(size: int | None) -> float | None:
    return None if size is None else size // MIB


DCGM: Final = (
    Row(
        "DCGM_FI_DEV_GPU_UTIL", _DCGM, "Utilization in percent.",
        _as_dcgm(lambda gpu: gpu.utilization),
    ),
    Row(
        "DCGM_FI_DEV_FB_USED", _DCGM, "Memory in use, in MiB.",
        _as_dcgm(lambda gpu: _mib(gpu.memory.used)),
    ),
    Row(
        "DCGM_FI_DEV_FB_FREE", _DCGM, "Memory that is not in use, in MiB.",
        _as_dcgm(lambda gpu: _mib(_free(gpu))),
    ),
    Row(
        "DCGM_FI_DEV_GPU_TEMP", _DCGM, "Temperature in degrees Celsius.",
        _as_dcgm(lambda gpu: gpu.temperature),
    ),
    Row(
        "DCGM_FI_DEV_POWER_USAGE", _DCGM, "Power in watts.", _as_dcgm(lambda gpu: gpu.power),
    ),
)  # fmt: skip
"""What DCGM-exporter says of GPUs, by its names, for dashboards that are made for it."""


class _Scrape(Collector):
    """The metrics of one scrape; None: the daemon does not answer."""

    def __init__(self, seen: Seen | None, *, by_job: bool, dcgm: bool) -> None:
        self._seen = seen
        self._by_job = by_job
        self._dcgm = dcgm

    def collect(self) -> Iterable[Metric]:
        if self._seen is None:
            yield GaugeMetricFamily(UP.name, UP.meaning, 0.0)
            return
        for row in (*TABLE, *(DCGM if self._dcgm else ())):
            if self._by_job or not row.by_job:
                yield row.family(self._seen)


def exposition(
    seen: Seen | None, accept: str, *, by_job: bool, dcgm: bool = False
) -> tuple[bytes, str]:
    """Return the metrics in the format that the header `accept` asks for, and its media type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(seen, by_job=by_job, dcgm=dcgm))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


class MetricsPage:
    """Serves /metrics."""

    def __init__(self, daemon: DaemonReader, *, by_job: bool) -> None:
        """`by_job` adds the metrics of each job, as the query jobs=1 does for one request."""
        self._daemon = daemon
        self._by_job = by_job

    async def metrics(self, request: Request) -> Response:
        """Answer one scrape; with 200 and gpulease_daemon_up 0 if the daemon does not answer.

        So a scrape fails, `up` is 0, only if gpulease-web itself is away.
        """
        try:
            seen = await self._daemon.ask("metrics", _ask)
        except NoDaemon:
            seen = None
        by_job = self._by_job or request.query_params.get("jobs") == "1"
        dcgm = request.query_params.get("dcgm") == "1"
        accept = request.headers.get("accept", "")
        body, media_type = exposition(seen, accept, by_job=by_job, dcgm=dcgm)
        return Response(body, headers={"content-type": media_type})


def _ask(client: Client) -> Seen:
    return Seen(client.status(queue=0), client.metrics())
