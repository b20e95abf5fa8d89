"""Leases of RAM and cores: one pool of the server, in the fit test, reservations and limits."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ALICE, BOB, NOON, G, reading, running_job, waits
from goldens import mentions
from gpulease.domain.explain import Explanations, suggestions
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.host_memory import HostMemory, HostPolicy, HostReading
from gpulease.domain.job import Job, Outcome, Owner, aging
from gpulease.domain.lease import Claim
from gpulease.domain.limits import UserLimits
from gpulease.domain.placement import ObstacleKind
from gpulease.domain.plan import Plan, plan, started, why_waiting
from gpulease.domain.queue_options import QueuePolicy
from gpulease.domain.snapshot import Snapshot
from gpulease.errors import CannotLease
from gpulease.server.reasons import explanation
from gpulease.service.refusals import refuse_beyond_host, refuse_what_is_never_within
from gpulease.units import Share

CARDS = tuple(reading(f"GPU-{index}", index, total=80 * G) for index in range(4))
SERVER = HostReading(100 * G, 100 * G, 16)
NO_RESERVE = HostPolicy(0)
HOUR = timedelta(hours=1)
CAROL = Owner(1002, 1002, "carol")


def job(number: int, ram: int | None = None, owner: Owner = ALICE, **claim: object) -> Job:
    size = None if ram is None else ram * G
    asked = replace(Claim(G, ram=size), **claim)  # type: ignore[arg-type]
    return Job(JobId(number), owner, "job", "true", asked, NOON)


def running(waiting: Job, gpu: str = "GPU-0") -> Job:
    return running_job(waiting, gpu, at=NOON - HOUR)


def decide(jobs: Iterable[Job], host: HostReading | None = SERVER, **fields: object) -> Plan:
    policy = QueuePolicy(most_sharing=99, soft_reservation_after=24 * HOUR)
    whole = Snapshot(tuple(jobs), CARDS, NOON, policy=policy, host=host, host_policy=NO_RESERVE)
    return plan(replace(whole, **fields))  # type: ignore[arg-type]


def granted(decided: Plan) -> set[int]:
    return {number for number, _ in decided.grants}


def why(decided: Plan, asked: Job) -> str:
    return explanation(asked.claim, why_waiting(decided, asked), len(CARDS)).why or ""


def test_jobs_start_while_there_is_ram_for_them_and_others_say_what_is_missing() -> None:
    jobs = [job(1, 60), job(2, 60), job(3, 30), job(4)]
    decided = decide(jobs)
    assert granted(decided) == {1, 3, 4}
    assert why(decided, jobs[1]) == "needs 60G of RAM, and at most 10G is free"
    assert waits(decided, 2).refusal.waits_for == (1, 3)
    assert suggestions(decided, jobs[1], G)[-1].options == "--ram 10G"


def test_cores_are_leased_in_the_same_way() -> None:
    jobs = [job(1, cpus=12), job(2, cpus=8), job(3, cpus=4)]
    decided = decide(jobs)
    assert granted(decided) == {1, 3}
    assert why(decided, jobs[1]) == "needs 8 cores, and none is free"
    both = job(4, 120, cpus=1)
    assert mentions(why(decided, both), "120G of RAM", "100G is free", "1 core", "none")


def test_what_others_use_and_the_reserve_are_not_leased() -> None:
    held = running(job(1, 30))
    busy = replace(SERVER, available=50 * G, used={JobId(1): 10 * G})  # 40G by others
    assert HostMemory.of(busy, NO_RESERVE, [held]).ram == 30 * G
    assert HostMemory.of(busy, HostPolicy(5 * G, 4), [held]).ram == 25 * G
    assert HostMemory.of(busy, HostPolicy(Share(Fraction(10)), 4), [held]).cores == 12
    over = replace(busy, used={JobId(1): 45 * G})
    assert HostMemory.of(over, NO_RESERVE, [held]).ram == 50 * G, "what it takes is not free"


def test_unknown_is_never_zero() -> None:
    held, wanted = running(job(1, 30)), job(2, 30)
    for blind in (None, replace(SERVER, available=None), replace(SERVER, ram=None)):
        decided = decide([held, wanted, job(3)], blind)
        assert granted(decided) == {3}
        assert why(decided, wanted) == "the RAM of this machine cannot be read"
    unseen = replace(SERVER, available=60 * G)  # by the job, or by others
    assert HostMemory.of(unseen, NO_RESERVE, [held]).ram == 30 * G
    refuse_beyond_host(wanted.claim, replace(SERVER, ram=None), NO_RESERVE)


def test_a_large_job_is_not_overtaken_by_small_ones_for_as_long_as_they_come() -> None:
    large = aging(job(2, 90, BOB), NOON - 40 * HOUR)
    holder = running(job(1, 30, time_limit=3 * HOUR))
    long, short = (job(3 + n, 20, CAROL, time_limit=n * HOUR) for n in (9, 1))
    before = running(job(20, None, time_limit=2 * HOUR))  # its end gives no RAM
    decided = decide([holder, before, large, long, short])
    assert granted(decided) == {4}, "it ends before the large one can start"
    (kept,) = decided.reservations
    assert (kept.job, kept.at_s) == (2, (NOON + 2 * HOUR).timestamp())
    behind = why_waiting(decided, long).refusal.host
    assert behind is not None and behind.kind is ObstacleKind.RESERVED
    assert mentions(why(decided, long), "reserved for job 2")
    assert explanation(long.claim, why_waiting(decided, long), 4).behind == 2
    free = job(10, None, CAROL, time_limit=9 * HOUR)
    assert 10 in granted(decide([holder, large, free])), "it leases no RAM"
    beside = job(11, 10, CAROL, time_limit=9 * HOUR)
    assert 11 in granted(decide([holder, large, beside])), "both fit"


def test_a_start_is_predicted_for_when_ram_is_free() -> None:
    decided = decide([running(job(1, 60, time_limit=3 * HOUR)), job(2, 60)])
    assert Explanations(decided).starts[JobId(2)].at == NOON + 2 * HOUR


def test_limits_of_users_count_what_they_lease() -> None:
    limits = UserLimits(most_ram=50 * G, most_cpus=8)
    jobs = [job(1, 30), job(2, 30), job(3, 20, BOB), job(4, cpus=6), job(5, cpus=6), job(6)]
    decided = decide(jobs, limits={ALICE.uid: limits})
    assert granted(decided) == {1, 3, 4, 6}
    assert mentions(why(decided, jobs[1]), "50G of RAM", "most_ram", "30G is leased")
    assert mentions(why(decided, jobs[4]), "8 cores", "most_cpus", "6 are leased")
    for claim, said in ((job(1, 60).claim, "most_ram"), (job(1, cpus=9).claim, "most_cpus")):
        with pytest.raises(CannotLease, match=said):
            refuse_what_is_never_within(claim, limits, 80 * G, "alice")


def test_what_the_machine_never_has_is_refused() -> None:
    for claim, said in (
        (job(1, 96).claim, "cannot lease 96G of RAM: this machine has 95G to lease"),
        (job(1, cpus=17).claim, "cannot lease 17 cores: this machine has 16 to lease"),
    ):
        with pytest.raises(CannotLease, match=said) as error:
            refuse_beyond_host(claim, SERVER, HostPolicy())
        assert error.value.hint


def test_preemptible_jobs_make_way_for_ram_as_for_memory_of_gpus() -> None:
    def idle(number: int, ram: int | None, gpu: str) -> Job:
        made = job(number, ram)
        return running(replace(made, queue=replace(made.queue, preemptible=True)), gpu)

    spare = [idle(1, 20, "GPU-0"), idle(2, 50, "GPU-1"), idle(3, None, "GPU-2")]
    wanted = job(4, 70, named=(CARDS[3].uuid,))
    decided = decide([*spare, wanted])
    assert dict(decided.preempts) == {2: 4}, "the only one that helps"
    assert decided.promised.keys() == {4}
    going = replace(spare[1], outcome=Outcome.PREEMPTED)
    others = [running(job(1, 20)), going, wanted, job(5, 25)]
    meanwhile = decide(others, promised=decided.promised)
    assert granted(meanwhile) == set(), "what is free is promised, too"
    left = [each for each in spare if each.id != 2]
    assert granted(decide([*left, wanted], promised=decided.promised)) == {4}
    normal = running(job(6, 50), "GPU-1")
    assert not decide([spare[0], spare[2], normal, job(4, 90)]).preempts, "it would not help"


class Machine:
    """A server with random jobs, and strangers that use RAM."""

    RAM, CORES = 256 * G, 64

    def __init__(self, random: Random) -> None:
        self.random = random
        self.live: dict[JobId, Job] = {}
        self.at = NOON
        self.strangers = 0
        self.ran: set[JobId] = set()
        self.promised: Mapping[JobId, frozenset[GpuUuid]] = {}

    def submit(self, number: int) -> None:
        pick = self.random
        claim = Claim(
            pick.randint(1, 40) * G,
            pick.choice((1, 1, 1, 2)),
            time_limit=pick.choice((None, HOUR, 9 * HOUR)),
            ram=pick.choice((None, pick.randint(1, 240) * G)),
            cpus=pick.choice((None, pick.randint(1, 60))),
        )
        owner = pick.choice((ALICE, BOB, CAROL))
        made = Job(JobId(number), owner, "job", "true", claim, self.at)
        options = replace(made.queue, preemptible=pick.random() < 0.2, aging_since_at=self.at)
        self.live[made.id] = replace(made, queue=options)

    def look(self, *, calm: bool) -> HostReading:
        """Let everything use what it may, or more, and return a reading of it."""
        pick, holding = self.random, self.holding
        used = {
            each.id: int(each.claim.ram * (1 if calm else pick.random() * 1.1))
            for each in holding
            if each.claim.ram is not None and pick.random() < 0.9
        }
        self.strangers = 0 if calm else min(pick.randint(0, 200) * G, self.RAM - sum(used.values()))
        self.strangers = max(0, self.strangers)
        available = max(0, self.RAM - self.strangers - sum(used.values()))
        is_blind = not calm and pick.random() < 0.05
        return HostReading(self.RAM, None if is_blind else available, self.CORES, used)

    @property
    def holding(self) -> list[Job]:
        return [each for each in self.live.values() if each.holds_memory]

    def end_some(self, part: float) -> None:
        for each in self.holding:
            if self.random.random() < part:
                del self.live[each.id]

    def decide(self, *, calm: bool = False) -> None:
        self.at += timedelta(minutes=self.random.randint(0, 40))
        host = self.look(calm=calm)
        self.end_some(0.05)  # after the reading, which still has what they used
        policy = QueuePolicy(most_sharing=99)
        decided = plan(
            Snapshot(
                tuple(self.live.values()), CARDS, self.at, policy=policy, host=host,
                host_policy=NO_RESERVE, promised=self.promised,
            )
        )  # fmt: skip
        self.promised = decided.promised
        for number, placement in decided.grants:
            self.live[number] = started(self.live[number], placement, self.at)
            self.ran.add(number)
        self.check(host, [self.live[number].claim for number, _ in decided.grants])
        for victim, _ in decided.preempts:
            self.live.pop(victim, None)

    def check(self, host: HostReading, new: list[Claim]) -> None:
        taken = sum(max(job.claim.ram or 0, host.used.get(job.id, 0)) for job in self.holding)
        if any(claim.ram for claim in new):
            assert host.available is not None, "nothing is promised blindly"
            assert taken + self.strangers <= self.RAM
        assert sum(job.claim.cpus or 0 for job in self.holding) <= self.CORES


@given(st.integers(0, 1 << 32))
@settings(max_examples=4, deadline=None)
def test_nothing_is_promised_twice_to_500_random_jobs_beside_strangers(seed: int) -> None:
    machine = Machine(Random(seed))
    for number in range(1, 501):
        machine.submit(number)
        machine.decide()
        machine.end_some(0.3)
    waiting = {number for number, each in machine.live.items() if not each.holds_memory}
    for _ in range(len(waiting)):
        machine.decide(calm=True)
        machine.end_some(1.0)
    assert waiting <= machine.ran, "every job has its turn"
