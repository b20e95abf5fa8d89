"""The tables of the database as typed rows, with constraints for what a single row can violate.

Instants are stored as UTC microseconds since 1970, so that they sort and compare in SQL; enums by
value; arguments and paths with one character per byte, so that any file name survives.
"""

from datetime import UTC, datetime, timedelta

from sqlalchemy import (
    CheckConstraint,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    TypeDecorator,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from gpulease.domain.lease import HOLDS_MEMORY, State

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STATES = ", ".join(f"'{state}'" for state in State)
_HOLDERS = ", ".join(f"'{state}'" for state in sorted(HOLDS_MEMORY))


class Instant(TypeDecorator[datetime]):
    """An aware UTC datetime, stored as microseconds since 1970."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else (value - EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        return None if value is None else EPOCH + timedelta(microseconds=value)


class Row(DeclarativeBase):
    """Base of all rows; constraints are named, so that migrations can drop them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: Instant, str: String, bytes: LargeBinary}  # noqa: RUF012


class PropertyRow(Row):
    """A property of the database itself, such as the id of the installation."""

    __tablename__ = "properties"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class GpuRow(Row):
    """A GPU that was seen at least once."""

    __tablename__ = "gpus"
    __table_args__ = (Index("ix_gpus_number", "number", unique=True),)

    uuid: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int | None]
    """Stands for it in `job_memory`, which has many rows; given at the first sample."""
    gpu_index: Mapped[int]
    name: Mapped[str]
    total: Mapped[int | None]
    drained: Mapped[str | None]
    """Why a person drained it, may be empty; null if not drained."""
    drained_by: Mapped[str | None]
    drained_at: Mapped[datetime | None]
    ailment: Mapped[str | None]
    """The hardware fault for which gpulease drained it; `ailment_kind` in one word."""
    ailment_kind: Mapped[str | None]
    ailment_at: Mapped[datetime | None]
    excused: Mapped[str | None]
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]


class GpuEventRow(Row):
    """A health event of a GPU; a few hundred are kept for each."""

    __tablename__ = "gpu_events"
    __table_args__ = (Index("ix_gpu_events_gpu", "gpu"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"))
    at: Mapped[datetime]
    """When it last happened, if several times."""
    kind: Mapped[str]
    detail: Mapped[str]
    count: Mapped[int] = mapped_column(server_default=text("1"))


class GpuMemoryRow(Row):
    """The memory of one GPU now (`resolution` 0) or in one span of the past, in bytes.

    For a span, the values are the largest in it, since peaks matter. Beside each are the sum of
    its values, each times the seconds for which it held, and these seconds: null in rows of older
    releases.
    """

    __tablename__ = "gpu_memory"
    __table_args__ = (
        CheckConstraint("resolution IN (0, 1, 60, 900)", name="resolution"),
        {"sqlite_with_rowid": False},
    )

    uuid: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"), primary_key=True)
    resolution: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(primary_key=True)
    used: Mapped[int | None]
    committed: Mapped[int | None]
    unmanaged: Mapped[int | None]
    utilization: Mapped[int | None]
    leased: Mapped[int | None]
    temperature: Mapped[int | None]
    power: Mapped[int | None]
    """Watts."""
    used_sum: Mapped[int | None]
    used_seconds: Mapped[int | None]
    leased_sum: Mapped[int | None]
    leased_seconds: Mapped[int | None]
    committed_sum: Mapped[int | None]
    committed_seconds: Mapped[int | None]
    unmanaged_sum: Mapped[int | None]
    unmanaged_seconds: Mapped[int | None]
    utilization_sum: Mapped[int | None]
    utilization_seconds: Mapped[int | None]
    temperature_sum: Mapped[int | None]
    temperature_seconds: Mapped[int | None]
    power_sum: Mapped[int | None]
    power_seconds: Mapped[int | None]


class JobMemoryRow(Row):
    """What a job used of one GPU in one span of the past, in bytes.

    The values, sums and seconds are as those of `GpuMemoryRow`.
    """

    __tablename__ = "job_memory"
    __table_args__ = (
        CheckConstraint("resolution IN (10, 60, 900)", name="resolution"),
        {"sqlite_with_rowid": False},
    )

    gpu: Mapped[int] = mapped_column(ForeignKey("gpus.number"), primary_key=True)
    resolution: Mapped[int] = mapped_column(primary_key=True)
    """Seconds."""
    at: Mapped[datetime] = mapped_column(primary_key=True)
    # No foreign key: to delete a job, SQLite would read the whole table.
    job: Mapped[int] = mapped_column(primary_key=True)
    used: Mapped[int | None]
    pool: Mapped[int | None]
    """What the pools of its frameworks had in use."""
    utilization: Mapped[int | None]
    used_sum: Mapped[int | None]
    used_seconds: Mapped[int | None]
    pool_sum: Mapped[int | None]
    pool_seconds: Mapped[int | None]
    utilization_sum: Mapped[int | None]
    utilization_seconds: Mapped[int | None]


class JobRow(Row):
    """A job: owner, claim, state and outcome."""

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(f"state IN ({_STATES})", name="state"),
        CheckConstraint("gpus > 0", name="gpus"),
        CheckConstraint("(memory IS NULL) <> (share IS NULL)", name="memory_or_share"),
        CheckConstraint("memory IS NULL OR memory > 0", name="memory"),
        CheckConstraint("(state = 'ended') = (ended_at IS NOT NULL)", name="ended_at"),
        CheckConstraint("(state = 'ended') <= (outcome IS NOT NULL)", name="outcome"),
        CheckConstraint(f"(state IN ({_HOLDERS})) <= (granted_at IS NOT NULL)", name="granted_at"),
        Index("ix_jobs_live", "state", sqlite_where=text("state <> 'ended'")),
        Index("ix_jobs_user", "user"),
        Index("ix_jobs_alike", "uid", "alike", sqlite_where=text("alike IS NOT NULL")),
        Index("ix_jobs_array", "array", sqlite_where=text("array IS NOT NULL")),
        Index("ix_jobs_ended", "ended_at", sqlite_where=text("ended_at IS NOT NULL")),
        # An id is never used again, even after the last job was deleted.
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[int]
    gid: Mapped[int]
    user: Mapped[str]
    name: Mapped[str]
    command: Mapped[str]
    memory: Mapped[int | None]
    share: Mapped[str | None]
    gpus: Mapped[int]
    exclusive: Mapped[bool]
    time_limit_us: Mapped[int | None]
    state: Mapped[str]
    submitted_at: Mapped[datetime]
    gives_up_at: Mapped[datetime | None]
    granted_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    pid: Mapped[int | None]
    shim_pid: Mapped[int | None]
    outcome: Mapped[str | None]
    detail: Mapped[str | None]
    exit_code: Mapped[int | None]
    exit_signal: Mapped[int | None]
    main_exited_at: Mapped[datetime | None]
    terminal: Mapped[bool] = mapped_column(server_default=text("0"))
    grace_us: Mapped[int | None]
    kept_until_at: Mapped[datetime | None]
    alike: Mapped[str | None]
    """The similar key of the command's fingerprint; `same` is the exact key."""
    same: Mapped[str | None]
    sized: Mapped[str | None]
    retry: Mapped[str | None]
    """The factor for the memory of a retry after an out-of-memory end, as a fraction."""
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    retry_of: Mapped[int | None]
    retried_as: Mapped[int | None]
    out_of_memory: Mapped[bool] = mapped_column(server_default=text("0"))
    priority: Mapped[str] = mapped_column(server_default=text("'normal'"))
    queue_nice: Mapped[int] = mapped_column(server_default=text("0"))
    held: Mapped[bool] = mapped_column(server_default=text("0"))
    begin_at: Mapped[datetime | None]
    after: Mapped[str | None]
    """The jobs that it still waits for, such as "12:ok,13:any"; null for none."""
    requeue: Mapped[bool] = mapped_column(server_default=text("0"))
    preemptible: Mapped[bool] = mapped_column(server_default=text("0"))
    array: Mapped[int | None]
    """The id of the array, which is the id of its first element."""
    array_index: Mapped[int | None]
    array_most: Mapped[int | None]
    aging_since_at: Mapped[datetime | None]
    moved_before: Mapped[int | None]
    """The queued job that it goes before; 0: before all others of its owner."""
    moved_by_admin: Mapped[bool] = mapped_column(server_default=text("0"))
    requeued: Mapped[int] = mapped_column(server_default=text("0"))
    retries: Mapped[int] = mapped_column(server_default=text("0"))
    retry_on: Mapped[str | None]
    """Exit statuses, separated by commas; null for any but 0."""
    retry_delay_us: Mapped[int | None]
    """Null for a job without retries."""
    retried: Mapped[int] = mapped_column(server_default=text("0"))
    predicted_run_us: Mapped[int | None]
    predicted_start_at: Mapped[datetime | None]
    predicted_from_at: Mapped[datetime | None]
    predicted_until_at: Mapped[datetime | None]
    utilization: Mapped[int | None]
    """Percent, the mean over its run and its GPUs."""
    gpu_uuids: Mapped[str | None]
    """The only suitable GPUs, separated by commas; null for any."""
    gpu_model: Mapped[str | None]
    min_vram: Mapped[int | None]
    same_model: Mapped[bool] = mapped_column(server_default=text("0"))
    linked: Mapped[bool] = mapped_column(server_default=text("0"))
    first_use_at: Mapped[datetime | None]
    """When a framework or the driver first reported its use of a GPU."""
    steps: Mapped[int | None]
    """Training steps, as a framework counts them."""
    steps_per_second: Mapped[float | None] = mapped_column(Float)
    slurm_job: Mapped[int | None]
    """The job of Slurm that the lease belongs to; null for none, like the node and the restarts."""
    slurm_node: Mapped[str | None]
    slurm_restarts: Mapped[int | None]
    notify: Mapped[str | None]
    """The events of which its owner is notified, separated by commas."""
    memory_bound: Mapped[int | None]
    """What it may use while no other job needs it: bytes, or the share; null without a range."""
    share_bound: Mapped[str | None]
    ram: Mapped[int | None]
    """Leased bytes of RAM, and cores; null for none."""
    cpus: Mapped[int | None]
    ram_peak: Mapped[int | None]
    """The most bytes of RAM of all its processes together; null if unknown, like the CPU time."""
    cpu_us: Mapped[int | None]


class HolderRow(Row):
    """The processes behind a lease without a command; jobs with one have no such row."""

    __tablename__ = "holders"
    __table_args__ = (
        CheckConstraint("(pid IS NULL) = (started IS NULL)", name="process"),
        CheckConstraint("(asker_pid IS NULL) = (asker_started IS NULL)", name="asker"),
        CheckConstraint("boot IS NOT NULL OR (pid IS NULL AND asker_pid IS NULL)", name="boot"),
    )

    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    boot: Mapped[str | None]
    """The boot id of the processes."""
    pid: Mapped[int | None]
    started: Mapped[int | None]
    """Clock ticks from boot to the start of the process."""
    asker_pid: Mapped[int | None]
    asker_started: Mapped[int | None]
    adopted: Mapped[bool] = mapped_column(server_default=text("0"))
    """The process used its GPUs before it had the lease."""


class SubmissionRow(Row):
    """The idempotency key of a submission: the same key does not submit another job."""

    __tablename__ = "submissions"
    __table_args__ = (Index("ix_submissions_job", "job"), {"sqlite_with_rowid": False})

    uid: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"))


class InvocationRow(Row):
    """The invocation of a job as compressed JSON; its environment is deleted when the job ends.

    All elements of an array have that of its first element, which stays until the last has ended.
    """

    __tablename__ = "invocations"

    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    content: Mapped[bytes]


class LeaseRow(Row):
    """The lease of a job on one GPU."""

    __tablename__ = "leases"
    __table_args__ = (
        CheckConstraint("memory > 0", name="memory"),
        CheckConstraint("released_at IS NULL OR released_at >= granted_at", name="released_at"),
        Index("ix_leases_held", "gpu", sqlite_where=text("released_at IS NULL")),
        {"sqlite_with_rowid": False},
    )

    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    gpu: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"), primary_key=True)
    place: Mapped[int]
    """The position among the job's GPUs, from 0."""
    memory: Mapped[int]
    granted_at: Mapped[datetime]
    released_at: Mapped[datetime | None]
    peak: Mapped[int | None]
    over_for_us: Mapped[int | None]
    enforced_by: Mapped[str | None]
    """Its enforcement levels, separated by commas; empty for none, null if unknown."""
    driver_limit: Mapped[int | None]
    used: Mapped[int | None]
    memory_bound: Mapped[int | None]


class PoolRow(Row):
    """The memory pool of a framework on a GPU, as reported by the job, and its overhead."""

    __tablename__ = "pools"
    __table_args__ = (
        Index("ix_pools_kind", "framework", "model", "driver", "gpus"),
        {"sqlite_with_rowid": False},
    )

    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    gpu: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"), primary_key=True)
    framework: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[str]
    uid: Mapped[int]
    model: Mapped[str]
    driver: Mapped[str]
    gpus: Mapped[int]
    """The number of GPUs of the job."""
    pool_limit: Mapped[int | None]
    pool_peak: Mapped[int | None]
    beside: Mapped[int | None]
    """The overhead: the process's memory by the driver, less its pool."""
    at: Mapped[datetime]


class HookRow(Row):
    """What a hook did about one framework in one process of a job."""

    __tablename__ = "hooks"
    __table_args__ = ({"sqlite_with_rowid": False},)

    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    pid: Mapped[int] = mapped_column(primary_key=True)
    framework: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[str]
    state: Mapped[str]
    limits: Mapped[str]
    """Bytes of its pool by GPU, as a JSON object; null for a pool without a size."""
    why: Mapped[str | None]
    at: Mapped[datetime]


class EventRow(Row):
    """One entry in the history of a job; never changed."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_job", "job"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"))
    at: Mapped[datetime]
    kind: Mapped[str]
    detail: Mapped[str | None]


class WindowRow(Row):
    """A span of time, once or recurring, for which an admin sets GPUs apart."""

    __tablename__ = "windows"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    gpus: Mapped[int]
    uuids: Mapped[str | None]
    """The GPUs, separated by commas; null for any."""
    begins_at: Mapped[datetime]
    """The begin; a recurring window begins at the instants of `cron` from then on."""
    lasts_us: Mapped[int]
    cron: Mapped[str | None]
    """Five fields as in crontab(5); null for once."""
    users: Mapped[str | None]
    """The users with jobs that may start on these GPUs then, separated by commas."""
    groups: Mapped[str | None]
    created_by: Mapped[str]
    created_at: Mapped[datetime]
    lifts_limits: Mapped[bool] = mapped_column(server_default=text("0"))


class NotificationRow(Row):
    """A notification for a user: about a job, or for an admin about the machine."""

    __tablename__ = "notifications"
    __table_args__ = (
        Index("ix_notifications_job", "job"),
        Index("ix_notifications_next", "next_at", sqlite_where=text("next_at IS NOT NULL")),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int | None] = mapped_column(ForeignKey("jobs.id"))
    uid: Mapped[int]
    event: Mapped[str]
    title: Mapped[str]
    body: Mapped[str]
    at: Mapped[datetime]
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    next_at: Mapped[datetime | None]
    """When to try next; null: it was sent, or was given up for `error`."""
    error: Mapped[str | None]
