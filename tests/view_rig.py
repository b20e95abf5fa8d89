"""A queue with the latest plan, and what views of its jobs are drawn from."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fakes import NOON, FakeClock, G, MemoryStore, order, reading
from gpulease.domain.eligibility import own_block
from gpulease.domain.idle import IdleState
from gpulease.domain.job import Job, grant, worker_started
from gpulease.domain.lease import State
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Plan, plan
from gpulease.domain.snapshot import Snapshot
from gpulease.server.job_views import JobViews
from gpulease.service.explaining import Explainer
from gpulease.service.observation import Peaks
from gpulease.service.ports import Event

GPUS = [reading("GPU-a", 0), reading("GPU-b", 1)]
EVENT = Event(NOON, "test")


class World:
    """A store with jobs, the latest plan, and what views of jobs are drawn from."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), FakeClock()
        self.plan: Plan | None = None
        self.policy = SimpleNamespace(smallest_lease=0)
        self.closed: str | None = None
        self.seen = None
        self.peaks = Peaks()
        self.observer = SimpleNamespace(readings=lambda: {each.uuid: each for each in GPUS})
        self.explainer = Explainer(lambda: self.plan, self.clock)
        nothing: Any = SimpleNamespace(of=lambda _: (), steps=lambda _: None)
        self.sources: Any = SimpleNamespace(
            simulated=True,
            directory_of=lambda job: Path(f"/jobs/{job}"),
            enforcement=SimpleNamespace(everywhere=()),
            overuse=SimpleNamespace(
                stops=lambda _: False, state=lambda *_: SimpleNamespace(over_for=None)
            ),
            idleness=SimpleNamespace(state=lambda _: IdleState(), policy=lambda _: None),
            hooks=nothing,
            utilization=lambda _: None,
            unheld=lambda _: (),
            pools_of=lambda _: (),
        )

    def grace(self, job: Job) -> timedelta | None:
        return timedelta(seconds=30) if job.holder is None else None

    def views(self) -> JobViews:
        scheduler: Any = self
        return JobViews(scheduler, lambda _: False, self.sources, self.explainer)

    def change(self, what: str, job: Job, number: int) -> None:
        self.clock.forward(seconds=1)
        match what:
            case "submit":
                self.put(replace(job, submitted_at=self.clock.now()))
            case "plan":
                self.make_plan()
            case "explain":
                self.explainer.refresh_here()
            case "close":
                self.closed = None if self.closed else "root paused the queue"
            case _:
                self._change(what, number)

    def make_plan(self) -> None:
        self.plan = plan(Snapshot(self.store.live(), GPUS, self.clock.now()))

    def put(self, job: Job) -> None:
        made = self.store.add(order(), NOON)
        after = tuple(each for each in job.queue.after if self.store.job(each.job))
        self.store.save(replace(job, id=made.id, queue=replace(job.queue, after=after)), EVENT)

    def start(self, place: int) -> None:
        """Grant one of the live jobs what it asks for."""
        job = self.store.live()[place]
        gpus = GPUS[: job.claim.gpus]
        allocations = tuple((each.uuid, job.claim.memory_on(8 * G)) for each in gpus)
        self.store.save(grant(job, Placement(allocations), self.clock.now()), EVENT)

    def _change(self, what: str, number: int) -> None:
        live = self.store.live()
        if not live:
            return
        job = live[number % len(live)]
        if what == "rename":
            self.store.save(replace(job, name=f"{job.name}2"), EVENT)
        elif what == "start" and job.state is State.QUEUED and own_block(job, NOON) is None:
            self.start(number % len(live))
        elif what == "run" and job.state is State.GRANTED:
            started = worker_started(job, 7, 6, self.clock.now())
            self.store.save(started or job, EVENT)
