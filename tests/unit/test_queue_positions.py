"""The rows of the queue and their positions, after any changes."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from view_rig import World

from fakes import ALICE, BOB, NOON, G, MemoryStore, order
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim, State
from gpulease.domain.queue_options import ArrayElement, Dependency, Priority, QueueOptions
from gpulease.server.job_views import JobViews
from gpulease.server.queue_positions import Placed, Row, without

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
claims = st.builds(Claim, st.integers(1, 24).map(lambda count: count * G), st.integers(1, 2))
jobs = st.builds(
    Job,
    id=st.just(JobId(1)),
    owner=st.sampled_from([ALICE, BOB]),
    name=st.just("job"),
    command=st.just("true"),
    claim=claims,
    submitted_at=st.just(NOON),
    queue=options,
)
changes = st.tuples(
    st.sampled_from(
        ["submit", "submit", "submit", "plan", "explain", "close", "rename", "start", "run"]
    ),
    jobs,
    st.integers(0, 20),
)


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


def test_all_jobs_of_one_answer_are_drawn_from_one_pass() -> None:
    world = World()
    world.make_plan()
    job = world.store.add(replace(order(), queue=QueueOptions(held=True)), NOON)
    views = world.views()
    views.begin()
    before = views.wait(job)
    world.make_plan()
    assert views.wait(job) == before
    views.begin()
    assert views.wait(job).block is not None


def _check_rows(world: World, rows: Sequence[Row], every: Sequence[Placed], most: int) -> None:
    if len(every) <= most:
        assert rows == [[each] for each in every]
        return
    groups: dict[Hashable, list[Placed]] = {}
    for each in every:
        groups.setdefault(_shared(world.views(), each), []).append(each)
    assert rows == [*groups.values()][:most]
    for row in rows:
        sent = world.views().row(row)
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
