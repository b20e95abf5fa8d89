"""What jobs asked for and used, summed up by user, group, week and month."""

import asyncio
import csv
import io
import os
import pwd
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest

from fakes import (
    ALICE,
    NOON,
    FakeClock,
    ended_job,
    order,
    reading,
    running_job,
)
from gpulease.cli.report import csv_of, page
from gpulease.daemon.user_policy import with_names_of_groups
from gpulease.domain.explain import standings
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.job import (
    Job,
    Outcome,
    Owner,
    PredictionErrors,
    UsageBy,
    UsageTotal,
)
from gpulease.domain.lease import Claim
from gpulease.domain.plan import plan
from gpulease.notifications.messages import WeeklyReports
from gpulease.notifications.outbox import Outbox
from gpulease.server.usage import report_view
from gpulease.service.observation import Observation
from gpulease.service.ports import Event, Policy
from gpulease.service.queue_state import QueueState
from gpulease.store.memory_history import MemoryHistory
from gpulease.store.store import SqlStore
from gpulease.store.usage import UsageTotals
from gpulease.units import GIB, Share

EVENT = Event(NOON, "test")
HOUR = timedelta(hours=1)
NO_ERRORS = PredictionErrors(0, None, 0, None)
BOB = Owner(1001, 100, "bob")


@pytest.fixture(autouse=True)
def second_gpu(store: SqlStore) -> None:
    with store.write() as tx:
        tx.add_gpus([reading("GPU-2")], NOON)


def ran(
    store: SqlStore,
    owner: Owner = ALICE,
    *,
    used: int | None = GIB,
    waited: timedelta = timedelta(0),
    ended: datetime = NOON,
    gpus: int = 1,
    expected: tuple[timedelta, timedelta] | None = None,
    run_time: timedelta | None = None,
    outcome: Outcome = Outcome.EXITED,
) -> Job:
    """Return a job that held 4G of each of its GPUs for an hour."""
    granted = ended - HOUR
    uuids = (reading().uuid, GpuUuid("GPU-2"))[:gpus]
    with store.write() as tx:
        job = tx.add(replace(order(), owner=owner), granted - waited)
        if expected is not None:
            first, last = (job.submitted_at + each for each in expected)
            job = replace(job, predicted_from_at=first, predicted_until_at=last)
        job = replace(job, predicted_run_for=run_time)
        started = running_job(job, *uuids, memory=4 * GIB, at=granted)
        tx.save(started, EVENT)
        measured = tuple(replace(each, used=used) for each in started.leases)
        with_use = replace(started, leases=measured)
        done = ended_job(with_use, outcome, at=ended)
        tx.save(done, EVENT)
    return done


def test_starts_in_their_first_range_are_counted(store: SqlStore) -> None:
    for waited in (1, 9, 10):
        ran(store, waited=waited * HOUR, expected=(HOUR, 9 * HOUR))
    ran(store)
    errors = UsageTotals(store).predictions(None, None)
    assert (errors.ranges, errors.in_range) == (3, 2)


def test_a_job_that_made_way_does_not_count_as_a_wrong_prediction(store: SqlStore) -> None:
    ran(store, run_time=1.5 * HOUR)
    for outcome in (Outcome.PREEMPTED, Outcome.REQUEUED, Outcome.LOST):
        ran(store, run_time=9 * HOUR, outcome=outcome)
    errors = UsageTotals(store).predictions(None, None)
    assert (errors.runs, errors.run_error) == (1, 1800)


def totals(store: SqlStore, by: UsageBy, user: str | None = None) -> dict[str, UsageTotal]:
    return {each.key: each for each in UsageTotals(store).totals(by, user, None, NOON)}


def test_what_was_asked_and_never_used_is_counted_by_gpu_and_time(store: SqlStore) -> None:
    ran(store, used=GIB, gpus=2)
    ran(store, used=3 * GIB)

    found = totals(store, UsageBy.USER)[ALICE.user]

    assert (found.jobs, found.seconds) == (2, 3 * 3600)
    assert (found.asked, found.used) == (12 * GIB * 3600, 5 * GIB * 3600)
    assert found.unused == 7 * GIB * 3600
    # A job above its lease saves no memory of others.
    ran(store, used=9 * GIB)
    assert totals(store, UsageBy.USER)[ALICE.user].unused == 7 * GIB * 3600


def test_the_wait_of_a_job_on_two_gpus_counts_once_since_an_instant_or_of_all(
    store: SqlStore,
) -> None:
    ran(store, waited=9 * HOUR, ended=NOON - timedelta(days=2))
    ran(store, waited=2 * HOUR, gpus=2)
    ran(store, waited=timedelta(0))
    # The clock was set back between submission and grant.
    ran(store, waited=-HOUR)

    found = totals(store, UsageBy.USER)[ALICE.user]
    (waits,) = UsageTotals(store).waits(NOON - timedelta(days=1)).values()

    assert (found.mean_wait, found.longest_wait) == (11 * 3600 / 4, 9 * 3600)
    assert (waits.started, waits.mean_s, waits.longest_s) == (3, 2400, 7200)


def test_a_lease_with_unknown_use_counts_as_leased_and_not_as_unused(store: SqlStore) -> None:
    ran(store, used=None, waited=9 * HOUR)
    ran(store, used=GIB)

    found = totals(store, UsageBy.USER)[ALICE.user]
    assert (found.jobs, found.asked, found.longest_wait) == (2, 8 * GIB * 3600, 9 * 3600)
    assert (found.used, found.unused) == (GIB * 3600, 3 * GIB * 3600)
    assert (found.measured, found.measured_seconds) == (4 * GIB * 3600, 3600)
    row = str(page(report_view(UsageBy.USER, [found], None, NO_ERRORS)))
    assert "'25%'" in row, "of what is known"


def holds(store: SqlStore, owner: Owner, since: datetime, *, memory: int, waited: timedelta) -> Job:
    """Return a job that has held so much of each of two GPUs since an instant."""
    with store.write() as tx:
        job = tx.add(replace(order(), owner=owner), since - waited)
        started = running_job(job, "GPU-a", "GPU-2", memory=memory, at=since)
        tx.save(started, EVENT)
    return started


@pytest.mark.parametrize("for_", [timedelta(minutes=30), timedelta(days=21)])
def test_what_is_held_now_counts_up_to_now(store: SqlStore, for_: timedelta) -> None:
    ran(store, BOB, waited=HOUR, ended=NOON)
    now = NOON + for_
    job = holds(store, ALICE, NOON, memory=53 * GIB, waited=timedelta(minutes=10))
    again = holds(store, BOB, now - timedelta(minutes=6), memory=GIB, waited=3 * HOUR)
    gpus = [lease.gpu for lease in job.leases]
    MemoryHistory(store).record([], {(job.id, gpu): 10 * GIB for gpu in gpus})

    found = {it.key: it for it in UsageTotals(store).totals(UsageBy.USER, None, None, now)}
    alice, bob = found[ALICE.user], found["bob"]
    assert alice.asked == pytest.approx(106 * GIB * for_.total_seconds())
    assert alice.used == pytest.approx(20 * GIB * for_.total_seconds())
    assert (alice.jobs, alice.mean_wait) == (1, 600)
    assert bob.asked == pytest.approx(GIB * (4 * 3600 + 2 * 360))
    assert (bob.jobs, bob.mean_wait) == (2, 7200)

    since = NOON - timedelta(minutes=1) if for_ < HOUR else now - timedelta(days=1)
    waits = UsageTotals(store).waits(since)
    recent = UsageTotals(store).totals(UsageBy.USER, None, since, now)
    assert {it.key: it.mean_wait for it in recent if it.mean_wait is not None} == {
        user: each.mean_s for user, each in waits.items()
    }
    (month, *_) = UsageTotals(store).totals(UsageBy.MONTH, ALICE.user, None, now)
    assert month.key == f"{now.astimezone():%Y-%m}-01"
    assert month.asked == alice.asked
    with store.write() as tx:
        tx.save(ended_job(again, at=now), EVENT)
    after = UsageTotals(store).totals(UsageBy.USER, "bob", None, now + 9 * HOUR)
    assert (after[0].asked, after[0].mean_wait) == (pytest.approx(bob.asked), 7200)


@pytest.mark.parametrize("asks", ["exclusive", "40%"])
def test_the_fair_share_of_a_job_is_what_its_lease_was_on_the_gpu_that_it_was_on(
    store: SqlStore, asks: str
) -> None:
    small = reading("GPU-2", 1, total=3 * GIB)
    seen = Observation((reading(), small), {}, NOON)
    claim = Claim(Share(Fraction(2, 5)) if asks == "40%" else GIB, exclusive=asks == "exclusive")
    memory = claim.memory_on(3 * GIB)
    uses = []
    with store.write() as tx:
        job = tx.add(replace(order(), owner=ALICE, claim=claim), NOON)
        running = running_job(job, small.uuid, memory=memory)
        tx.save(running, EVENT)
    now = NOON + timedelta(minutes=30)
    for ended in (False, True):
        if ended:
            with store.write() as tx:
                tx.save(ended_job(running, at=now), EVENT)
        state = QueueState(store)
        decided = plan(state.snapshot(store.live(), seen, Policy(), {}, now))
        (alice,) = standings(decided)
        uses.append(alice.use)
    (total,) = UsageTotals(store).totals(UsageBy.USER, None, None, now)
    assert total.asked == memory * 1800
    assert uses == [pytest.approx(total.asked, rel=0.02)] * 2


def test_users_and_groups_have_totals_of_their_own(store: SqlStore) -> None:
    ran(store, ALICE), ran(store, BOB), ran(store, replace(BOB, gid=0))

    users, groups = (totals(store, by) for by in (UsageBy.USER, UsageBy.GROUP))
    named = with_names_of_groups(UsageTotals(store).totals)

    assert {key: each.jobs for key, each in users.items()} == {ALICE.user: 1, "bob": 2}
    assert {key: each.jobs for key, each in groups.items()} == {str(ALICE.gid): 1, "100": 1, "0": 1}
    assert [*totals(store, UsageBy.GROUP, "bob")] == ["0", "100"]
    assert "root" in {each.key for each in named(UsageBy.GROUP, None, None, NOON)}
    view = report_view(UsageBy.GROUP, [*groups.values()], None, NO_ERRORS)
    assert (view.users, len(view.parts)) == ([], 3)


@pytest.fixture
def in_utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.usefixtures("in_utc")
def test_weeks_begin_on_monday_and_months_on_the_first(store: SqlStore) -> None:
    days = ("2026-11-15 23:59", "2026-11-16 00:00", "2026-11-22 23:59", "2026-12-01 00:00")
    for day in days:
        ran(store, ended=datetime.fromisoformat(day).replace(tzinfo=UTC))

    weeks, months = totals(store, UsageBy.WEEK), totals(store, UsageBy.MONTH)

    assert {key: each.jobs for key, each in weeks.items()} == {
        "2026-11-09": 1,
        "2026-11-16": 2,
        "2026-11-30": 1,
    }
    assert {key: each.jobs for key, each in months.items()} == {"2026-11-01": 3, "2026-12-01": 1}


def test_the_csv_of_a_report_has_gib_hours_and_seconds(store: SqlStore) -> None:
    ran(store, waited=HOUR)
    found = UsageTotals(store).totals(UsageBy.USER, None, None, NOON)

    (row,) = csv.DictReader(io.StringIO(csv_of(report_view(UsageBy.USER, found, None, NO_ERRORS))))

    assert (row["user"], row["jobs"], row["gpu_hours"]) == (ALICE.user, "1", "1.0")
    assert (row["leased_gib_hours"], row["unused_gib_hours"]) == ("4.0", "3.0")
    assert row["longest_wait_s"] == "3600.0"


def test_each_user_gets_a_message_about_the_week_on_the_day_for_it(store: SqlStore) -> None:
    uid = os.geteuid()
    me = replace(ALICE, uid=uid, user=pwd.getpwuid(uid).pw_name)
    ran(store, me, used=GIB)
    ran(store, me, used=GIB, ended=NOON - timedelta(days=8))
    ran(store, replace(ALICE, user="removed"))
    settings = {"weekly_report": "none"}
    clock = FakeClock()
    reports = WeeklyReports(
        store, UsageTotals(store).totals, clock, asyncio.to_thread, lambda: settings
    )
    asyncio.run(reports.daily())
    assert Outbox(store).new_of(uid, datetime.now(UTC), 9, digest=False)[0] == []
    settings["weekly_report"] = NOON.astimezone().strftime("%a").lower()
    asyncio.run(reports.daily())
    (title,) = Outbox(store).new_of(uid, datetime.now(UTC), 9, digest=False)[0]
    assert title.startswith("your jobs left 3 of 4 GiB-hours")
