"""The statements that write, made once.

On the tables and not on the rows: writing is what the daemon does most, and through the rows the
same statement costs it about three times the CPU.
"""

from datetime import datetime

from sqlalchemy import bindparam, delete, insert, text, update
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.dialects.sqlite import insert as upsert

from gpulease.domain.memory import GpuReading
from gpulease.store.tables import GpuRow, Row

_tables = Row.metadata.tables
_jobs, _leases, _invocations = _tables["jobs"], _tables["leases"], _tables["invocations"]

ADD_JOB = insert(_jobs).returning(_jobs.c.id)
RESTORE_JOB = insert(_jobs)
SAVE_JOB = update(_jobs).where(_jobs.c.id == bindparam("this"))
ADD_INVOCATION = insert(_invocations)
DROP_INVOCATION = delete(_invocations).where(_invocations.c.job == bindparam("this"))
ADD_SUBMISSION = insert(_tables["submissions"])
ADD_HOLDER = insert(_tables["holders"])
ADD_LEASE = insert(_leases)
DROP_LEASES = delete(_leases).where(_leases.c.job == bindparam("this"))
_CHANGING = ("granted_at", "released_at", "enforced_by", "driver_limit", "used")
CHANGE_LEASE = (
    update(_leases)
    .where(_leases.c.job == bindparam("this"), _leases.c.gpu == bindparam("that"))
    .values({name: bindparam(name) for name in _CHANGING})
)
NOTE_OVER = (
    update(_leases)
    .where(_leases.c.job == bindparam("this"), _leases.c.gpu == bindparam("that"))
    .values(over_for_us=bindparam("over_for_us"))
)
ADD_EVENT = insert(_tables["events"])

# AUTOINCREMENT goes on from here, see sqlite.org/autoinc.html.
START_SEQUENCE = text(
    "INSERT INTO sqlite_sequence (name, seq) SELECT 'jobs', :last "
    "WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'jobs')"
)
RAISE_SEQUENCE = text("UPDATE sqlite_sequence SET seq = max(seq, :last) WHERE name = 'jobs'")


def remember_gpu(reading: GpuReading, at: datetime) -> Insert:
    """Return the statement that stores a GPU, or that it was seen again."""
    seen = {"gpu_index": reading.index, "name": reading.name, "last_seen_at": at}
    if reading.total is not None:
        seen["total"] = reading.total
    return (
        upsert(GpuRow)
        .values(uuid=reading.uuid, first_seen_at=at, **seen)
        .on_conflict_do_update(index_elements=[GpuRow.uuid], set_=seen)
    )
