"""The quick ways to write a queue as JSON give what drawing every job afresh gives."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from view_rig import World

from fakes import ALICE, BOB, NOON, G, MemoryStore, order
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Holder, Job, JobUsage, Process
from gpulease.domain.lease import Claim, State
from gpulease.domain.queue_options import ArrayElement, Dependency, Priority, QueueOptions
from gpulease.server.job_views import JobViews
from gpulease.server.queue_positions import Placed, Row, without
from gpulease.server.redaction import redact_job
from gpulease.units import Share
from gpulease.wire.jobs import JobView

options = st.builds(
    QueueOptions,
    priority=st.sampled_from(Priority),
    nice=st.integers(-20, 19),
    held=st.booleans(),
    begin_at=st.none() | st.just(NOON + timedelta(hours=1)),
    after=st.just(()) | st.just((Dependency(JobId(1)),)),
    requeue=st.booleans(),
    array=st.none() | st.builds(ArrayElement, st.just(JobId(1)), st.integers(0, 9), st.none()),
)
claims = st.builds(
    Claim,
    st.integers(1, 24).map(lambda count: count * G) | st.just(Share(Fraction(40))),
    st.integers(1, 2),
    st.booleans(),
    st.none() | st.just(timedelta(hours=2)),
    named=st.just(()) | st.just((GpuUuid("GPU-b"),)),
)
jobs = st.builds(
    Job,
    id=st.just(JobId(1)),
    owner=st.sampled_from([ALICE, BOB]),
    name=st.text(min_size=1, max_size=8),
    command=st.text(max_size=12),
    claim=claims,
    submitted_at=st.just(NOON),
    gives_up_at=st.none() | st.just(NOON + timedelta(days=1)),
    terminal=st.booleans(),
    holder=st.none() | st.just(Holder(Process(5, 5, "boot"), None)),
    usage=st.builds(
        JobUsage,
        size_reason=st.none() | st.text(max_size=5),
        out_of_memory=st.booleans(),
        retry_of=st.none() | st.just(JobId(1)),
    ),
    queue=options,
    notify=st.just(()) | st.just(("fail", "time-left=600")),
)
changes = st.tuples(
    st.sampled_from(
        ["submit", "submit", "submit", "plan", "explain", "close", "rename", "start", "run"]
    ),
    jobs,
    st.integers(0, 20),
)


def _afresh(views: JobViews, job: Job, viewer: str | None, position: int | None) -> bytes:
    view: JobView = views.job(job)
    if position is not None:
        view = replace(view, position=position)
    return msgspec.json.encode(view if viewer is None else redact_job(view, viewer))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(changes, max_size=14))
def test_after_any_changes_the_json_is_that_of_jobs_drawn_afresh(
    done: list[tuple[str, Job, int]],
) -> None:
    world = World()
    for change in done:
        world.change(*change)
        for viewer in (None, "alice"):
            for job in world.store.live():
                drawn = world.quick.of(job, viewer)
                position = world.kept.wait(job).position
                assert drawn == _afresh(world.views(), job, viewer, position)
            views = world.views()
            for row in views.rows(None):
                (placed,) = row
                drawn = world.quick.row(row, viewer)
                assert drawn == _afresh(world.views(), placed.job, viewer, placed.position)


@settings(deadline=None)
@given(st.lists(changes, max_size=14), st.integers(0, 5))
def test_the_first_rows_have_distinct_queued_jobs_and_each_element_that_they_stand_for(
    done: list[tuple[str, Job, int]], most: int
) -> None:
    world = World()
    for change in done:
        world.change(*change)
    every = [each for (each,) in world.views().rows(None)]
    rows = world.views().rows(most)
    _check_rows(world, rows, every, most)
    queued = {job.id for job in world.store.live() if job.state is State.QUEUED}
    assert sorted(each.job.id for each in every) == sorted(queued)
    places = [each.position for each in every if each.position is not None]
    assert places == [*range(1, len(places) + 1)]
    assert all(each.position is None for each in every[len(places) :])


@given(st.sets(st.integers(1, 6)), st.integers(0, 6))
def test_jobs_that_have_started_since_leave_no_gap_in_the_queue(
    started: set[int], in_order: int
) -> None:
    store = MemoryStore()
    queued = [store.add(order(), NOON) for _ in range(6)]
    rows = [[Placed(job, job.id if job.id <= in_order else None)] for job in queued]
    left = [each for row in without(rows, {JobId(it) for it in started}) for each in row]
    assert [each.job for each in left] == [job for job in queued if job.id not in started]
    places = [each.position for each in left if each.position is not None]
    assert places == [*range(1, len({*range(1, in_order + 1)} - started) + 1)]


def _check_rows(world: World, rows: Sequence[Row], every: Sequence[Placed], most: int) -> None:
    if len(every) <= most:
        assert rows == [[each] for each in every]
        return
    groups: dict[Hashable, list[Placed]] = {}
    for each in every:
        groups.setdefault(_shared(world.views(), each), []).append(each)
    assert rows == [*groups.values()][:most]
    for row in rows:
        sent = msgspec.json.decode(world.quick.row(row), type=JobView)
        assert (sent.id, sent.position) == (row[0].job.id, row[0].position)
        stands_for = sent.queue and sent.queue.array_waiting
        assert (stands_for.jobs if stands_for else 1) == len(row)


def _shared(views: JobViews, placed: Placed) -> Hashable:
    """Return what is the same for elements that share a row; another value for each other job."""
    job, position = placed
    options = job.queue
    if options.array is None:
        return job.id
    if position is not None:
        return options.array.job, None
    return options.array.job, views.wait(job).block or (options.held, options.after)
