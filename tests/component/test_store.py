"""The SQLite file: what is kept in it, and what it refuses."""

import os
import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from fakes import (
    ALICE,
    HOLDER,
    NOON,
    FakeClock,
    G,
    ended_job,
    granted_job,
    hold_order,
    order,
    reading,
    running_job,
)
from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.enforcement import AppliedEnforcement, with_enforcement
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId, build_ledger
from gpulease.domain.health import GpuEvent
from gpulease.domain.job import (
    EarlySignal,
    Exit,
    Holder,
    Invocation,
    Job,
    Outcome,
    SlurmJob,
    TerminalSettings,
    UsageBy,
    main_exited,
)
from gpulease.domain.lease import Claim, State
from gpulease.domain.queue_options import Condition, Dependency, Priority, QueuePause
from gpulease.errors import StateUnusable
from gpulease.service.job_list import JobQuery
from gpulease.service.ports import Event, Submission
from gpulease.service.scheduler import follow_clock
from gpulease.store.engine import open_engine
from gpulease.store.machine import MOST_EVENTS
from gpulease.store.memory_history import NOW, RESOLUTIONS, MemoryHistory, Sample
from gpulease.store.rows import pack, unpack
from gpulease.store.schema import HEAD, MIGRATIONS, migrate
from gpulease.store.store import SqlStore
from gpulease.store.tables import GpuMemoryRow, Row
from gpulease.store.usage import UsageTotals
from gpulease.units import Share

DATA = Path(__file__).parents[1] / "data"
GPU = GpuUuid("GPU-a")
EVENT = Event(NOON, "test")


def again(store: SqlStore) -> SqlStore:
    store.close()
    return SqlStore(store.path)


def released(folder: Path, schema: str, *changes: str) -> SqlStore:
    """Open a database of an earlier schema, which this migrates."""
    path = folder / "gpulease.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((DATA / f"{schema}.sql").read_text())
        for change in changes:
            connection.execute(change)
        connection.commit()
    return SqlStore(path)


def add(store: SqlStore, wanted: Submission | None = None) -> Job:
    with store.write() as tx:
        return tx.add(wanted or order(), NOON)


def through_life(store: SqlStore, job: Job) -> Job:
    """Grant, start and end a job, a transaction each."""
    started = running_job(job)
    ended = ended_job(started, code=3, at=NOON + timedelta(hours=1))
    for step in (granted_job(job), started, ended):
        with store.write() as tx:
            tx.save(step, EVENT)
    return ended


def test_a_job_comes_back_from_the_disk_as_it_was(store: SqlStore) -> None:
    wanted = replace(order(), claim=Claim(Share(Fraction(100, 3)), 2, True, timedelta(hours=1)))
    choosy = Claim(
        G, 2, named=(GPU, GpuUuid("GPU-b")), model="A100", min_vram=G, same_model=True,
        ram=32 * G, cpus=8, linked=True,
    )  # fmt: skip
    adopted = replace(hold_order(), holder=Holder(HOLDER, None, adopted=True))
    timed = hold_order(process=None, time_limit=timedelta(hours=1))
    nobody = replace(hold_order(), holder=Holder(None, None))
    orders = wanted, replace(order(), claim=choosy), adopted, hold_order(), timed, nobody
    waiting = tuple(add(store, each) for each in orders)
    ended = through_life(store, add(store))
    opened = again(store)
    assert opened.live() == waiting
    assert opened.job(ended.id) == ended
    opened.close()


def test_what_holds_a_lease_is_kept_also_after_its_end(store: SqlStore) -> None:
    job = granted_job(add(store))
    at_launch = with_enforcement(
        job, ["framework"], AppliedEnforcement(devices=True, limits={GPU: G // 2})
    )
    nothing = with_enforcement(at_launch, [])
    for step, rungs, limit in (
        (job, None, None),
        (at_launch, ("driver", "framework", "devices"), G // 2),
        (nothing, (), None),
        (at_launch, ("driver", "framework", "devices"), G // 2),
    ):
        with store.write() as tx:
            tx.save(step, EVENT)
        store = again(store)
        (lease,) = store.live()[0].leases
        assert (lease.enforced_by, lease.driver_limit) == (rungs, limit)
    over = ended_job(at_launch, Outcome.LAUNCH_FAILED, None)
    with store.write() as tx:
        tx.save(over, EVENT)
    store = again(store)
    assert store.job(job.id) == over
    store.close()


def test_the_boot_in_which_the_record_was_used_last_is_kept(store: SqlStore) -> None:
    assert store.boot() is None
    for boot in ("one", "another"):
        store.note_boot(boot)
        store = again(store)
        assert store.boot() == boot
    store.close()


def test_a_job_comes_back_with_its_terminal_its_grace_and_the_end_of_its_main_process(
    store: SqlStore,
) -> None:
    wanted = order()
    invocation = replace(
        wanted.invocation,
        groups=(4, 27),
        terminal=TerminalSettings(24, 80, (1, 2, 3), stderr=False),
        early_signal=EarlySignal(10, timedelta(minutes=2)),
        grace=timedelta(seconds=5),
    )
    job = add(store, replace(wanted, invocation=invocation))
    assert (job.terminal, job.grace) == (True, timedelta(seconds=5))
    started = running_job(job)
    left = main_exited(started, Exit(None, 15), NOON + timedelta(hours=1))
    assert left is not None
    for step in (granted_job(job), started, left):
        with store.write() as tx:
            tx.save(step, EVENT)
    opened = again(store)
    assert opened.job(job.id) == left
    assert opened.invocation(job.id) == invocation
    opened.close()


system_strings = st.binary(max_size=40).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(system_strings, min_size=1, max_size=4),
    st.dictionaries(system_strings, system_strings, max_size=4),
)
def test_any_bytes_survive_as_arguments_and_environment(
    argv: list[str], environment: dict[str, str]
) -> None:
    invocation = Invocation(tuple(argv), "/", environment, 0o77, {"RLIMIT_NOFILE": 4})
    assert unpack(pack(invocation)) == invocation


def test_the_file_itself_refuses_what_cannot_be(store: SqlStore) -> None:
    add(store)
    lease = "leases (job, gpu, place, memory, granted_at)"
    for change in (
        "UPDATE jobs SET state = 'sleeping'",
        "UPDATE jobs SET gpus = 0",
        "UPDATE jobs SET memory = 0",
        "UPDATE jobs SET memory = NULL",
        "UPDATE jobs SET state = 'active'",
        "UPDATE jobs SET state = 'ended'",
        f"INSERT INTO {lease} VALUES (1, 'GPU-a', 0, 0, 0)",
        f"INSERT INTO {lease} VALUES (99, 'GPU-a', 0, 1, 0)",
        f"INSERT INTO {lease} VALUES (1, 'GPU-z', 0, 1, 0)",
        "INSERT INTO holders VALUES (1, 'boot', 10, NULL, NULL, NULL, 0)",
        "INSERT INTO holders VALUES (1, 'boot', NULL, NULL, NULL, 10, 0)",
        "INSERT INTO holders VALUES (1, NULL, 10, 11, NULL, NULL, 0)",
        "INSERT INTO holders VALUES (99, NULL, NULL, NULL, NULL, NULL, 0)",
    ):
        with pytest.raises(IntegrityError), store.engine.begin() as connection:
            connection.execute(text(change))


def test_the_file_is_for_its_owner_alone(store: SqlStore) -> None:
    for path in store.path.parent.glob("gpulease.db*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_commits_reach_the_disk_and_readers_do_not_wait(store: SqlStore) -> None:
    with store.engine.connect() as connection:
        pragma = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert pragma == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_a_window_is_found_as_it_was_added_until_it_is_removed(store: SqlStore) -> None:
    plain = Window(
        WindowId(0), "maintenance", 2, (), NOON, timedelta(hours=12), None, (), (), "root", NOON
    )
    full = replace(
        plain, name="nights", uuids=(GPU, GpuUuid("GPU-b")), cron="0 22 * * *",
        users=("alice", "bob"), groups=("lab",), lifts_limits=True,
    )  # fmt: skip
    with store.write() as tx:
        added = (tx.add_window(plain), tx.add_window(full))
        assert tx.windows() == added
    assert [replace(each, id=WindowId(0)) for each in added] == [plain, full]
    store = again(store)
    assert store.windows() == added
    with store.write() as tx:
        tx.remove_window(added[0].id)
    assert store.windows() == added[1:]
    store.close()


def test_the_migrations_make_exactly_what_the_rows_describe(tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    path = tmp_path / "migrated.db"
    path.touch()
    engine = open_engine(path)
    migrate(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Row.metadata) == []
    engine.dispose()
    assert ScriptDirectory(str(MIGRATIONS)).get_current_head() == HEAD
    SqlStore(tmp_path / "gpulease.db").close()
    assert _schema(tmp_path / "gpulease.db") == _schema(path)
    with closing(sqlite3.connect(path)) as connection:
        for table in Row.metadata.tables:  # a new database would lack rows that migrations add
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def _schema(path: Path) -> set[tuple[str, ...]]:
    """Return the columns of each table, and its indexes and constraints as SQL."""
    columns = (
        "SELECT tables.name, columns.* FROM sqlite_master AS tables, "
        "pragma_table_info(tables.name) AS columns WHERE tables.type = 'table'"
    )
    with closing(sqlite3.connect(path)) as connection:
        found = {
            (table, name, kind, str(required), (default or "").strip("'"), str(key))
            for table, _, name, kind, required, default, key in connection.execute(columns)
        }
        for table, sql in connection.execute("SELECT tbl_name, sql FROM sqlite_master"):
            found |= {
                (table, " ".join(line.split()).rstrip(","))
                for line in (sql or "").split("\n")
                if any(
                    word in line for word in ("INDEX", "CHECK", "KEY", "UNIQUE", "AUTOINC", "ROWID")
                )
            }
    return found


def test_a_newer_schema_is_refused_and_left_as_it_is(store: SqlStore) -> None:
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(StateUnusable) as refused:
        SqlStore(store.path)
    assert "9999" in refused.value.message
    assert "newer" in refused.value.message
    with closing(sqlite3.connect(store.path)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("9999",)


def test_a_file_that_is_no_database_or_not_ours_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpulease.db"
    path.write_bytes(b"these are not the bytes you are looking for" * 100)
    with pytest.raises(StateUnusable) as refused:
        SqlStore(path)
    assert refused.value.hint
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE guests (name TEXT)")
    with pytest.raises(StateUnusable):
        SqlStore(path)


@pytest.mark.parametrize("schema", sorted(each.stem for each in DATA.glob("*.sql")))
def test_a_file_of_every_released_schema_is_migrated_after_a_copy(
    schema: str, tmp_path: Path
) -> None:
    store = released(tmp_path, schema)
    states = sorted({job.state for job in store.jobs(JobQuery(ended=True)).jobs})
    assert states == sorted(State)
    store.close()
    if schema != HEAD:
        assert (tmp_path / f"gpulease.db.{schema}.backup").exists()


def test_what_earlier_releases_stored_is_read_back(tmp_path: Path) -> None:
    for schema in ("0005", "0006", "0007", "0010", "0011", "0012", "0013", "0015"):
        (tmp_path / schema).mkdir()
    with closing(released(tmp_path / "0005", "0005")) as store:
        [job] = [job for job in store.live() if job.queue.held]
        assert job.label == "1_3"
        assert (job.queue.priority, job.queue.nice, job.queue.requeued) == (Priority.LOW, 5, 1)
        assert job.queue.after == (Dependency(JobId(3), Condition.ANY),)
    with closing(released(tmp_path / "0006", "0006")) as store:
        live = {job.id: job for job in store.live()}
        [claim] = [job.claim for job in live.values() if job.claim.named]
        assert (claim.model, claim.min_vram, claim.same_model) == ("A100", 40 << 30, True)
        reports = {(each.framework, each.state) for each in store.hook_reports(JobId(3))}
        assert reports == {("tensorflow", "limited"), ("torch", "failed")}
        assert [job.id for job in live.values() if job.holder and job.holder.adopted] == [7]
    with closing(released(tmp_path / "0007", "0007")) as store:
        of_slurm = {job.id: job.slurm for job in store.live() if job.slurm}
        assert of_slurm == {11: SlurmJob(17, "n1", 1)}
    with closing(released(tmp_path / "0010", "0010")) as store:
        [options] = [job.queue for job in store.live() if job.queue.retries]
        assert (options.retry_on, options.retry_delay) == ((75, 137), timedelta(seconds=30))
        assert (options.retries, options.retried) == (3, 1)
    with closing(released(tmp_path / "0011", "0011")) as store:
        [job] = [job for job in store.live() if job.predicted_until_at]
        assert job.predicted_from_at == job.granted_at
        assert not any(lease.memory_bound for job in store.live() for lease in job.leases)
    with closing(released(tmp_path / "0012", "0012")) as store:
        active, waiting = (job for job in store.live() if job.claim.memory_bound)
        assert (active.claim.size, active.leases[0].size) == ("1G..10G", "1G..7.5G")
        assert waiting.claim.size == "1G..40%"
        assert not any(job.claim.ram or job.claim.cpus for job in store.live())
    with closing(released(tmp_path / "0013", "0013")) as store:
        asked = {job.id: (job.claim.ram, job.claim.cpus) for job in store.live() if job.claim.ram}
        assert asked == {1: (32 * G, 8), 3: (4 * G, 2)}
    with closing(released(tmp_path / "0015", "0015")) as store:
        assert [job.id for job in store.live() if job.claim.linked] == [10]


def test_a_migration_forgets_neither_how_far_ids_have_come_nor_what_a_job_is(
    tmp_path: Path,
) -> None:
    store = released(tmp_path, "0001", "UPDATE sqlite_sequence SET seq = 99 WHERE name = 'jobs'")
    for job in store.jobs(JobQuery(ended=True)).jobs:
        assert (job.holder, job.grace, job.main_exited_at) == (None, None, None)
        assert not job.terminal
        if job.state is not State.ENDED:
            assert store.invocation(job.id).terminal is None
    assert add(store).id == 100
    store.close()


def sample(seconds: float, used: int) -> Sample:
    gpu = build_ledger(reading(used=used), [], {})
    return Sample(NOON + timedelta(seconds=seconds), (gpu,))


def history(store: SqlStore) -> list[tuple[datetime, int | None]]:
    with store.reading() as connection:
        wanted = select(GpuMemoryRow.at, GpuMemoryRow.used).where(GpuMemoryRow.resolution != NOW)
        return [(at, used) for at, used in connection.execute(wanted.order_by(GpuMemoryRow.at))]


def test_the_memory_of_a_gpu_is_kept_by_the_second_then_the_minute_then_the_quarter(
    store: SqlStore,
) -> None:
    occupancy = MemoryHistory(store)
    occupancy.record([sample(n, n * 1024) for n in range(7200)], {})
    assert len(history(store)) == 7200
    occupancy.thin(NOON + timedelta(hours=2))
    kept = history(store)
    assert len(kept) == 60 + 3600
    assert kept[0] == (NOON, 59 * 1024), "of a minute the peak is kept"
    assert kept[60] == (NOON + timedelta(hours=1), 3600 * 1024)
    occupancy.thin(NOON + timedelta(hours=25))
    assert len(history(store)) == 4 + 60
    occupancy.thin(NOON + timedelta(days=3))
    assert [used for _, used in history(store)] == [(900 * n - 1) * 1024 for n in range(1, 9)]
    occupancy.thin(NOON + RESOLUTIONS[-1].keep_for + timedelta(days=1))
    assert history(store) == []


def test_peaks_only_rise(store: SqlStore) -> None:
    job = add(store)
    with store.write() as tx:
        tx.save(granted_job(job), EVENT)
    occupancy = MemoryHistory(store)
    for n, peak in enumerate((5, 9, 7)):
        occupancy.record([sample(n, 0)], {(job.id, GPU): peak})
    opened = again(store)
    found = opened.job(JobId(job.id))
    assert found is not None
    assert found.leases[0].peak == 9
    assert found.owner == ALICE
    opened.close()


def started(store: SqlStore, wanted: Submission) -> Job:
    with store.write() as tx:
        job = tx.add(wanted, NOON)
        tx.save(running_job(job), EVENT)
    return job


def ended_with_use(store: SqlStore, number: JobId, at: datetime) -> None:
    with store.write() as tx:
        now = tx.job(number)
        assert now is not None
        used = replace(now, leases=tuple(replace(each, used=G) for each in now.leases))
        tx.save(ended_job(used, at=at), EVENT)


@pytest.mark.parametrize("ahead", [timedelta(days=1), timedelta(days=-1)])
def test_a_clock_that_is_set_while_a_lease_is_held_adds_nothing_to_what_is_reported_of_it(
    store: SqlStore, ahead: timedelta
) -> None:
    clock = FakeClock()
    job = started(store, order())
    clock.forward(hours=1)
    clock.ahead = ahead
    follow_clock(store, clock)
    clock.forward(hours=1)
    ended_with_use(store, job.id, clock.now())
    (use,) = UsageTotals(store).totals(UsageBy.USER, None, None, NOON)
    assert (use.seconds, use.asked) == (7200, 7200 * G)


def test_what_users_bring_about_takes_nothing_from_the_history_of_the_hardware(
    store: SqlStore,
) -> None:
    gpu = GpuUuid("GPU-history")
    with store.write() as tx:
        tx.add_gpus([GpuReading(gpu, 0, "a GPU")], NOON)
        for hour in range(4):
            tx.note_gpu(GpuEvent(gpu, NOON + timedelta(hours=hour), "faulty", "ECC"))
        for n in range(3 * MOST_EVENTS):
            at = NOON + timedelta(hours=4, seconds=n)
            tx.note_gpu(GpuEvent(gpu, at, f"xid {13 if n % 2 else 31}", "a program's own"))
            tx.note_gpu(GpuEvent(gpu, at, "xid 45", f"pid {n}"))
    kept = store.gpu_events(NOON, 10_000)
    assert [each.kind for each in kept].count("faulty") == 4
    assert [each.kind for each in kept].count("xid 45") == MOST_EVENTS
    alternating = [each.count for each in kept if each.kind in ("xid 13", "xid 31")]
    assert alternating == [1.5 * MOST_EVENTS] * 2, "one storm, however it is mixed"


def test_a_pause_of_the_queue_survives_a_restart_and_follows_the_clock(tmp_path: Path) -> None:
    pause = QueuePause("root", "new driver", NOON)
    first = SqlStore(tmp_path / "gpulease.db")
    assert first.pause() is None
    with first.write() as tx:
        tx.set_pause(replace(pause, why=""))
        tx.set_pause(pause)
    first.close()
    again = SqlStore(tmp_path / "gpulease.db")
    assert again.pause() == pause
    by = timedelta(hours=1)
    follow_clock(again, FakeClock(ahead=by))
    assert again.pause() == replace(pause, at=NOON + by)
    with again.write() as tx:
        tx.set_pause(None)
        assert tx.pause() is None
    assert again.pause() is None
    again.close()
