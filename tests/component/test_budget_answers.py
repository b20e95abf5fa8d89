"""What the first jobs of a long queue cost: numbers that do not depend on the machine."""

from dataclasses import fields

import msgspec
from view_rig import World

from fakes import ALICE, BOB, NOON, G
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim, State
from gpulease.domain.queue_options import NO_OPTIONS, ArrayElement, QueueOptions
from gpulease.units import MIB
from gpulease.wire.machine import FIRST_IN_QUEUE

QUEUED = 3_000
REASONS = FIRST_IN_QUEUE
"""Explanations of why a job waits, for one status."""
BYTES = 40_000
"""Of the first jobs of the queue, which wait for two GPUs."""


def test_a_status_explains_and_sends_the_first_jobs_alone() -> None:
    world = World()
    held = Job(JobId(1), ALICE, "job", "true", Claim(8 * G, 2), NOON)
    world.put(held)
    for number in range(QUEUED):
        world.put(Job(JobId(1), ALICE, "job", "true", Claim(G + number * MIB // 2), NOON))
    world.start(0)
    world.clock.forward(seconds=1)
    world.make_plan()
    assert world.plan is not None
    world.explainer.refresh_here()

    views = world.views()
    drawn = [msgspec.json.encode(views.row(each)) for each in views.rows(FIRST_IN_QUEUE)]

    assert len(drawn) == FIRST_IN_QUEUE
    assert len(world.plan._reasons) <= REASONS
    assert sum(map(len, drawn)) <= BYTES


def test_an_array_takes_one_row_and_the_bytes_of_one_job() -> None:
    world = World()
    for index in range(QUEUED):
        queue = QueueOptions(array=ArrayElement(JobId(1), index))
        world.put(Job(JobId(1), ALICE, "job", "true", Claim(8 * G, 2), NOON, queue=queue))
    world.put(Job(JobId(1), BOB, "job", "true", Claim(G), NOON))
    world.make_plan()
    assert world.plan is not None
    world.explainer.refresh_here()

    views = world.views()
    rows = views.rows(FIRST_IN_QUEUE)
    drawn = [msgspec.json.encode(views.row(each)) for each in rows]

    assert [len(row) for row in rows] == [QUEUED, 1]
    assert len(world.plan._reasons) <= len(rows)
    assert sum(map(len, drawn)) <= len(rows) * BYTES / FIRST_IN_QUEUE
    assert f"0-{QUEUED - 1}".encode() in drawn[0]


def test_a_job_in_brief_says_the_same_as_the_whole_job_in_half_of_the_bytes() -> None:
    world = World()
    queue = QueueOptions(array=ArrayElement(JobId(1), 3))
    for memory, options in ((8, NO_OPTIONS), (8, NO_OPTIONS), (1, queue)):
        job = Job(JobId(1), ALICE, "job", "true", Claim(memory * G), NOON, queue=options)
        world.put(job)
    world.start(0)
    world.make_plan()
    world.explainer.refresh_here()

    views = world.views()
    for job in world.store.live():
        whole, brief = views.job(job), views.brief(job)
        for field in fields(brief):
            if field.name != "queue" or brief.queue is not None:
                assert getattr(brief, field.name) == getattr(whole, field.name)
        assert (brief.queue is None) == (job.queue.array is None)
        if job.state is State.QUEUED and job.queue.array is None:
            assert 2 * len(msgspec.json.encode(brief)) < len(msgspec.json.encode(whole))
