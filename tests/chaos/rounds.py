"""One round: a daemon on the stand-in, jobs and weather, quiet at the end, and the judgement."""

import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import msgspec

from chaos.jobs import Honest, any_job
from chaos.truth import Listed, Poll, Shown, Truth
from chaos.verdict import SAMPLE_S, Bounds, Grant, Tally, judge
from chaos.weather import G, Weather
from daemon_rig import wait_for
from gpulease.errors import GpuleaseError
from gpulease.wire.machine import StatusView
from nvml_stand_in import Card, StandIn
from torture.machine import Machine

Say = Callable[[str], None]

_CARDS = (
    Card(total=24 * G, name="Chaos A"),
    Card(total=24 * G, name="Chaos B"),
    Card(total=18 * G, reserved=G, name="Chaos C"),
)
_SETTINGS = f"""\
grace = "1s"
sample_every = "{SAMPLE_S:.0f}s"
overuse_tolerance = "32M"
overuse_grace = "1s"
"""
"""The timer looks so seldom that a grant which trusts its last look shows."""
_POLL_S = 0.15
_CALM_AFTER_S = 20.0
"""How long the weather lasts when the last job has been submitted."""
_QUIET_WITHIN_S = 180.0
"""How long the rest may take once all is well: NVML is tried again once a minute at least."""


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    jobs: int = 200
    at_once: int = 20
    failing: float = 0.01
    """The share of calls to NVML that fail."""
    silences: bool = True
    """Whether a GPU does not answer one question at all, for a moment."""
    lulls: bool = True
    """Whether there are times in which few jobs come, and find room."""
    within_s: float = 600.0
    """How long the jobs may take altogether; what is not over by then is stuck."""


def run(folder: Path, plan: Plan, seed: int, say: Say) -> Tally:
    """Run one round and return what was found."""
    rng = random.Random(seed)
    stand_in = StandIn(folder, gpus=_CARDS)
    folders = [stand_in.held(index) for index in range(len(_CARDS))]
    truth = Truth({card.uuid: (card.total or 0) - card.reserved for card in stand_in.gpus})
    machine = Machine(folder, None, simulate=None, settings=_SETTINGS)
    machine.environment |= stand_in.environment()
    machine.start()
    one = _Round(machine, truth, plan, rng, folders[0].parent)
    weather = Weather(
        stand_in, truth, random.Random(rng.random()), plan.failing, silences=plan.silences
    )
    tally = Tally(seed)
    try:
        machine.ready()
        weather.begin()
        try:
            one.run_jobs(say)
        finally:
            weather.end()
        one.settle(tally)
    except AssertionError as error:
        tally.fault("stuck", str(error))
    finally:
        if "Traceback" in machine.log.read_text(errors="replace"):
            tally.fault("traceback", f"in {machine.log}")
        _end(machine, one)
    told = stand_in.told()
    for each in sorted((each for each in told if each.code == 0), key=lambda each: each.at):
        truth.readings.setdefault(each.uuid, []).append((each.at, each.used))
    tally.failed_calls = sum(each.code != 0 for each in told)
    (folder / "truth.json").write_bytes(msgspec.json.encode(truth))
    judge(tally, truth, one.jobs, _grants(machine.state / "gpulease.db"), Bounds())
    one.judge_ends(tally, machine.state / "gpulease.db")
    return tally


def _end(machine: Machine, one: "_Round") -> None:
    """Leave no job behind, whatever became of the round."""
    with suppress(GpuleaseError, AssertionError):
        for number in [job.number for job in one.jobs if job.number is not None]:
            if number in one.live:
                machine.client().cancel(number)
        wait_for("the last jobs have ended", lambda: not machine.client().jobs().jobs, 30)
    if machine.is_up():
        machine.kill(signal.SIGTERM)


class _Round:
    """The jobs of a round, and the polls meanwhile."""

    def __init__(
        self, machine: Machine, truth: Truth, plan: Plan, rng: random.Random, held: Path
    ) -> None:
        self.jobs: list[Honest] = []
        self.live: set[int] = set()
        self._machine = machine
        self._truth = truth
        self._plan = plan
        self._rng = rng
        self._held = held
        self._begun_at = time.monotonic()
        self._ledgers = machine.folder / "ledgers"
        self._ledgers.mkdir()

    def run_jobs(self, say: Say) -> None:
        """Keep so many jobs waiting or running, until all have been submitted and most have ended.

        Those that want two GPUs alone may have to wait for the strangers to be gone.
        """
        lull, until, calm_at = False, 0.0, inf
        while len(self.jobs) < self._plan.jobs or (self.live and time.monotonic() < calm_at):
            self.poll()
            if self._plan.lulls and time.monotonic() > until:
                # In a lull there is room: a job is granted it because it comes, not because
                # another one ends and the daemon looks at the GPUs for that.
                lull, until = not lull, time.monotonic() + self._rng.uniform(3, 8)
            if not lull:
                self._submit_up_to(self._plan.at_once, say)
            elif self._rng.random() < 0.1:
                self._submit_up_to(len(self.live) + 1, say)
            if len(self.jobs) == self._plan.jobs:
                calm_at = min(calm_at, time.monotonic() + _CALM_AFTER_S)
            if time.monotonic() > self._begun_at + self._plan.within_s:
                raise AssertionError(f"jobs {sorted(self.live)} do not end; {self._reasons()}")

    def _submit_up_to(self, most: int, say: Say) -> None:
        while len(self.live) < most and len(self.jobs) < self._plan.jobs:
            self._submit()
            if len(self.jobs) % 50 == 0:
                say(f"{len(self.jobs)} of {self._plan.jobs} jobs submitted")

    def settle(self, tally: Tally) -> None:
        """Wait until everything is as it was before the first job."""

        def quiet() -> bool:
            gpus = self.poll().gpus
            return all(
                (gpu.state, gpu.leased, gpu.unmanaged, gpu.headroom)
                == ("available", 0, 0, self._truth.totals[uuid])
                for uuid, gpu in gpus.items()
            )

        begun_at = time.monotonic()
        try:
            wait_for("every job ends", lambda: not self.poll().jobs, _QUIET_WITHIN_S)
            wait_for("every GPU is whole and free again", quiet, _QUIET_WITHIN_S)
        except AssertionError as error:
            tally.fault("stuck", f"{error}; {self._reasons()}")
            return
        tally.settled_in_s = time.monotonic() - begun_at

    def poll(self) -> Poll:
        """Ask for the status once, and keep the answer."""
        time.sleep(_POLL_S)
        asked_at = time.time()
        status = self._machine.client().status()
        shown = {gpu.uuid: _shown(status, gpu.uuid) for gpu in status.gpus}
        self.live = {job.id for job in status.jobs}
        poll = Poll(asked_at, time.time(), shown, len(self.live))
        self._truth.polls.append(poll)
        return poll

    def judge_ends(self, tally: Tally, database: Path) -> None:
        """Judge how the jobs ended: as they were written, and once."""
        query = "SELECT id, state, outcome, exit_code, detail FROM jobs"
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            rows = {row[0]: row[1:] for row in connection.execute(query)}
        for job in self.jobs:
            row = rows.get(job.number or 0, ("unknown", None, None, None))
            named = f"job {job.number} ({job.kind}, {job.memory >> 30}G on {job.gpus})"
            if row[:3] != ("ended", "exited", job.code):
                tally.fault("stopped", f"{named}: {row}, and not exited {job.code}")
            wrote = job.ledger.read_text().split() if job.ledger.exists() else []
            if row[0] == "ended" and wrote != ["start", "end"]:
                tally.fault("stopped", f"{named}: it wrote {wrote}")

    def _submit(self) -> None:
        job = any_job(self._ledgers, len(self.jobs), self._rng)
        shown = self._machine.client().submit(job.request(self._held))
        job.number = shown.id
        self.jobs.append(job)
        self.live.add(shown.id)

    def _reasons(self) -> str:
        jobs = self._machine.client().jobs().jobs
        gpus = self._machine.client().status().gpus
        said = [f"{job.id} is {job.state}: {job.reason}" for job in jobs[:5]]
        said += [f"GPU {gpu.index} is {gpu.state}: {gpu.detail}" for gpu in gpus]
        return "; ".join(said)


def _shown(status: StatusView, uuid: str) -> Shown:
    gpu = next(each for each in status.gpus if each.uuid == uuid)
    of_jobs = sum(
        lease.memory
        for job in status.jobs
        if job.state in ("granted", "active", "releasing")
        for lease in job.leases
        if lease.gpu == uuid
    )
    memory = gpu.memory
    return Shown(
        gpu.state, memory.allocatable, memory.leased, memory.committed, memory.unmanaged,
        memory.headroom, of_jobs, memory.used,
        tuple(Listed(each.pid, each.memory, each.job) for each in gpu.processes),
    )  # fmt: skip


def _grants(database: Path) -> list[Grant]:
    """Read every lease that was ever granted, as the record has it."""
    query = (
        "SELECT leases.job, leases.gpu, leases.memory, leases.granted_at, leases.released_at, "
        "jobs.exclusive FROM leases JOIN jobs ON jobs.id = leases.job ORDER BY leases.granted_at"
    )
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return [
            Grant(job, gpu, memory, at / 1e6, None if until is None else until / 1e6, bool(alone))
            for job, gpu, memory, at, until, alone in connection.execute(query)
        ]
