"""The tables of the database, as typed rows; the file repeats the rules that a row alone can break.

Instants are stored as UTC microseconds since 1970, so that they sort and compare in SQL; enums by
value; arguments and paths as one character per byte, so that any file name survives.
"""

from datetime import UTC, datetime, timedelta

from sqlalchemy import (
    CheckConstraint,
    Dialect,
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

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STATES = ", ".join(f"'{state}'" for state in State)
_HOLDERS = ", ".join(f"'{state}'" for state in sorted(HOLDS_MEMORY))


class Instant(TypeDecorator[datetime]):
    """An aware UTC datetime, kept as microseconds since 1970."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else (value - _EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        return None if value is None else _EPOCH + timedelta(microseconds=value)


class Row(DeclarativeBase):
    """Base of all rows; every constraint has a name, or a migration could not drop it."""

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
    """A fact about the database itself, such as the name of this installation."""

    __tablename__ = "properties"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class GpuRow(Row):
    """A GPU that was seen at least once."""

    __tablename__ = "gpus"

    uuid: Mapped[str] = mapped_column(primary_key=True)
    gpu_index: Mapped[int]
    name: Mapped[str]
    total: Mapped[int | None]
    drained: Mapped[str | None]
    """Why a person drained it, which may be empty; null if nobody did."""
    drained_by: Mapped[str | None]
    drained_at: Mapped[datetime | None]
    ailment: Mapped[str | None]
    """The fault for which gpulease grants nothing on it, and `ailment_kind` in one word."""
    ailment_kind: Mapped[str | None]
    ailment_at: Mapped[datetime | None]
    excused: Mapped[str | None]
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]


class GpuEventRow(Row):
    """Something that happened to the health of a GPU; a few hundred are kept of each."""

    __tablename__ = "gpu_events"
    __table_args__ = (Index("ix_gpu_events_gpu", "gpu"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu: Mapped[str] = mapped_column(ForeignKey("gpus.uuid"))
    at: Mapped[datetime]
    """When it was last seen, of one that was seen several times."""
    kind: Mapped[str]
    detail: Mapped[str]
    count: Mapped[int] = mapped_column(server_default=text("1"))


class GpuMemoryRow(Row):
    """What one GPU's memory looked like, now (`resolution` 0) or over one span of the past.

    Of a span, `used` and `committed` are the largest seen in it: peaks are what people ask about.
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


class JobRow(Row):
    """A job: who, what for, where it stands, and how it ended."""

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
        # An id is never used a second time, not even after the last job was pruned.
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
    """The keys by which the runs of a script are recognised."""
    same: Mapped[str | None]
    sized: Mapped[str | None]
    retry: Mapped[str | None]
    """How much more memory after an end for want of it, as a fraction."""
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    retry_of: Mapped[int | None]
    retried_as: Mapped[int | None]
    out_of_memory: Mapped[bool] = mapped_column(server_default=text("0"))


class HolderRow(Row):
    """Whom a lease without a job is for; the other jobs have no such row."""

    __tablename__ = "holders"
    __table_args__ = (
        CheckConstraint("(pid IS NULL) = (started IS NULL)", name="process"),
        CheckConstraint("(asker_pid IS NULL) = (asker_started IS NULL)", name="asker"),
        CheckConstraint("boot IS NOT NULL OR (pid IS NULL AND asker_pid IS NULL)", name="boot"),
    )

    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    boot: Mapped[str | None]
    """Which boot of the machine the processes are of."""
    pid: Mapped[int | None]
    started: Mapped[int | None]
    """Clock ticks from that boot to the start of the process."""
    asker_pid: Mapped[int | None]
    asker_started: Mapped[int | None]


class SubmissionRow(Row):
    """The key under which a user has submitted a job; submitted again, it is not a new one."""

    __tablename__ = "submissions"
    __table_args__ = (Index("ix_submissions_job", "job"), {"sqlite_with_rowid": False})

    uid: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"))


class InvocationRow(Row):
    """How to start a job: compressed JSON, dropped when the job has ended."""

    __tablename__ = "invocations"

    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    content: Mapped[bytes]


class LeaseRow(Row):
    """One GPU's part of what a job holds, or held."""

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
    """0 for the GPU that the job counts first."""
    memory: Mapped[int]
    granted_at: Mapped[datetime]
    released_at: Mapped[datetime | None]
    peak: Mapped[int | None]
    over_for_us: Mapped[int | None]
    enforced_by: Mapped[str | None]
    """The rungs that it stands on, with commas between them; empty for none, null if unknown."""
    driver_limit: Mapped[int | None]
    used: Mapped[int | None]


class PoolRow(Row):
    """What one framework of a job held on a GPU, by its own word, and beside its pool."""

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
    """How many the job had."""
    pool_limit: Mapped[int | None]
    pool_peak: Mapped[int | None]
    beside: Mapped[int | None]
    """What the driver said that the process held, less its pool."""
    at: Mapped[datetime]


class EventRow(Row):
    """One entry of a job's history; never changed."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_job", "job"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"))
    at: Mapped[datetime]
    kind: Mapped[str]
    detail: Mapped[str | None]
