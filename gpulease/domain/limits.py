"""The limits of users and groups: what jobs hold at once, use in a week, and may ask for.

A user has limits, and shares those of each of their groups with the other members. A job over a
limit waits and delays nobody. Running jobs are never stopped for a limit.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Claim
from gpulease.units import GIB, counted, format_size

WEEK = timedelta(days=7)
_HOUR_S = 3600
_WEEK_HOURS = WEEK // timedelta(hours=1)


class Beyond(StrEnum):
    """What happens to a job that would put its user over a limit."""

    WAIT = "wait"
    REFUSE = "refuse"
    """Queued jobs count too, so a user never has more than the limit in all."""


@dataclass(frozen=True, slots=True)
class UserLimits:
    """The limits of one user; None is no limit. Each name is a key of the settings."""

    most_gpus: int | None = None
    """GPUs of all running jobs and holds: two jobs on one GPU count as two."""
    most_memory: int | None = None
    """Bytes of all their leases."""
    most_running: int | None = None
    """Jobs and holds that hold memory."""
    most_ram: int | None = None
    """Bytes of RAM that they lease in all; other jobs do not count, as for `most_cpus`."""
    most_cpus: int | None = None
    """Cores that they lease in all."""
    most_waiting: int | None = None
    """Queued jobs and holds."""
    gib_hours_per_week: int | None = None
    """Leased GiB times hours, over all GPUs and the past 7 days."""
    longest_time: timedelta | None = None
    """The longest time limit of a job or a hold."""
    default_time: timedelta | None = None
    """The time limit of a job that names none."""
    most_hold_time: timedelta | None = None
    """The longest time limit of a hold."""
    over_limit: Beyond = Beyond.WAIT
    groups: tuple["GroupLimits", ...] = ()
    """What the members of each of their groups have together."""

    def longest(self, *, hold: bool) -> tuple[timedelta, str] | None:
        """Return the longest time limit of a job or a hold, and its setting; None: any."""
        both = [(self.most_hold_time, "most_hold_time")] if hold else []
        both.append((self.longest_time, "longest_time"))
        return min(((span, name) for span, name in both if span is not None), default=None)

    def usual_time(self, *, hold: bool) -> tuple[timedelta, str] | None:
        """Return the time limit of a job or a hold that names none, and its setting; None: none."""
        usual = [] if hold or self.default_time is None else [(self.default_time, "default_time")]
        longest = self.longest(hold=hold)
        return min(usual if longest is None else [*usual, longest], default=None)

    @property
    def restrict_starts(self) -> bool:
        """Whether a job may have to wait for a limit."""
        most = (
            self.most_gpus, self.most_memory, self.most_running, self.most_ram, self.most_cpus,
            self.gib_hours_per_week,
        )  # fmt: skip
        return bool(self.groups) or any(each is not None for each in most)


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The limits of all members of a group together."""

    name: str
    limits: UserLimits
    """GPUs, memory, RAM, cores and GiB-hours count."""


NO_LIMITS = UserLimits()


def no_limits(_owner: Owner) -> UserLimits:
    """Return that a user has no limits."""
    return NO_LIMITS


@dataclass(frozen=True, slots=True)
class OverLimit:
    """The limit that a job would exceed."""

    setting: str
    """The name of the limit in the settings."""
    most: str
    """The limit, for display."""
    has: str
    """What the user has of it, for display."""
    until_at: datetime | None = None
    """It lasts at least until then, whatever ends; None: until enough jobs have ended."""
    group: str | None = None
    """The group that has reached it with all its members; None: the user alone."""

    def __str__(self) -> str:
        if self.group is not None:
            most = f"the limit of group {self.group} is {self.most} for all members together"
            return f"{most} ({self.setting}), and {self.has}"
        return f"the limit of its user is {self.most} ({self.setting}), and {self.has}"


class RecentUse:
    """The memory that one user leased in the past week, in GiB-hours, by hour.

    Sums by hour make a week cheap to add up, however many jobs ran in it. The oldest hour counts
    in proportion.
    """

    def __init__(self) -> None:
        self._by_hour: dict[int, float] = {}

    def add(self, begin: datetime, end: datetime, memory: int) -> None:
        """Add a lease of so many bytes; what is over a week older than its end is forgotten."""
        since, until = begin.timestamp(), end.timestamp()
        oldest = int(until // _HOUR_S) - _WEEK_HOURS
        since = max(since, oldest * _HOUR_S)
        while since < until:
            hour = int(since // _HOUR_S)
            upto = min(until, (hour + 1) * _HOUR_S)
            more = memory / GIB * (upto - since) / _HOUR_S
            self._by_hour[hour] = self._by_hour.get(hour, 0.0) + more
            since = upto
        for old in [hour for hour in self._by_hour if hour < oldest]:
            del self._by_hour[old]

    @classmethod
    def sum_of(cls, uses: Iterable["RecentUse"]) -> "RecentUse":
        """Return the use of several users together."""
        both = cls()
        for each in uses:
            # A copy: a forecast reads in another thread.
            for hour, use in list(each._by_hour.items()):
                both._by_hour[hour] = both._by_hour.get(hour, 0.0) + use
        return both

    def copy(self) -> "RecentUse":
        """Return a copy, which may forget by itself. For any thread."""
        twin = RecentUse()
        twin._by_hour = self._by_hour.copy()
        return twin

    def in_week_before(self, at: datetime) -> float:
        """Return the use in the 7 days before `at`."""
        return sum(use for _, use in self._within(at))

    def _within(self, at: datetime) -> list[tuple[int, float]]:
        """Return the use in the 7 days before `at` by hour, the oldest first."""
        first, passed = divmod(at.timestamp() / _HOUR_S - _WEEK_HOURS, 1)
        # A copy: a forecast reads in another thread.
        hours = sorted(self._by_hour.items())
        return [
            (hour, use * (1 - passed) if hour == first else use)
            for hour, use in hours
            if hour >= first
        ]

    def expires_at(self, excess: float, at: datetime) -> datetime | None:
        """Return when `excess` of the use before `at` is over a week old; None: never."""
        for hour, use in self._within(at):
            if use > excess:
                begin = max(hour, at.timestamp() / _HOUR_S - _WEEK_HOURS)
                gone = begin + excess / use * (hour + 1 - begin)
                return datetime.fromtimestamp(gone * _HOUR_S, UTC) + WEEK
            excess -= use
        return None


@dataclass(slots=True)
class Held:
    """What the jobs of one user hold."""

    running: int = 0
    gpus: int = 0
    memory: int = 0
    ram: int = 0
    cpus: int = 0
    gib_hours: float = 0.0
    """Used so far in the past 7 days by the leases that are still held."""


def memory_of(claim: Claim, largest: int) -> int:
    """Return the bytes that a claim takes in all, where the largest GPU offers `largest`."""
    return claim.gpus * claim.memory_on(largest)


def over_limit(limits: UserLimits, held: Held, claim: Claim, largest: int) -> OverLimit | None:
    """Return the limit that one more job of a user who holds so much would exceed."""
    memory = memory_of(claim, largest)
    if limits.most_running is not None and held.running + 1 > limits.most_running:
        most, has = f"{limits.most_running} running jobs and holds", f"{held.running} run"
        return OverLimit("most_running", most, has)
    if limits.most_gpus is not None and held.gpus + claim.gpus > limits.most_gpus:
        return OverLimit("most_gpus", counted(limits.most_gpus, "GPU"), f"{held.gpus} are leased")
    if limits.most_memory is not None and held.memory + memory > limits.most_memory:
        most, has = format_size(limits.most_memory), f"{format_size(held.memory)} is leased"
        return OverLimit("most_memory", most, has)
    return _over_host(limits, held, claim) if claim.leases_host else None


def _over_host(limits: UserLimits, held: Held, claim: Claim) -> OverLimit | None:
    most_ram, most_cpus = limits.most_ram, limits.most_cpus
    if most_ram is not None and claim.ram and held.ram + claim.ram > most_ram:
        has = f"{format_size(held.ram)} is leased"
        return OverLimit("most_ram", f"{format_size(most_ram)} of RAM", has)
    if most_cpus is not None and claim.cpus and held.cpus + claim.cpus > most_cpus:
        return OverLimit("most_cpus", counted(most_cpus, "core"), f"{held.cpus} are leased")
    return None


def over_budget(limits: UserLimits, held: Held, used: RecentUse, at: datetime) -> OverLimit | None:
    """Return that a user has used what the limit allows in a week, and until when at least."""
    budget = limits.gib_hours_per_week
    if budget is None:
        return None
    total = used.in_week_before(at) + held.gib_hours
    if total < budget:
        return None
    most, has = f"{budget} GiB hours in 7 days", f"{total:.1f} are used"
    return OverLimit("gib_hours_per_week", most, has, used.expires_at(total - budget, at))


def never_within(
    limits: UserLimits, claim: Claim, largest: int, user: str
) -> tuple[str, str] | None:
    """Return why a claim exceeds a limit even if its user holds nothing, and a hint.

    `user` is who has the limits, for display.
    """
    for group in limits.groups:
        found = never_within(group.limits, claim, largest, f"the group {group.name}")
        if found is not None:
            return found
    if limits.most_gpus is not None and claim.gpus > limits.most_gpus:
        asked, most = counted(claim.gpus, "GPU"), limits.most_gpus
        return (
            f"cannot lease {asked}: {user} may hold {most} at once (most_gpus)",
            f"ask for at most --gpus {most}",
        )
    memory, most_memory = memory_of(claim, largest), limits.most_memory
    if most_memory is not None and memory > most_memory:
        most_of_all, each = format_size(most_memory), format_size(most_memory // claim.gpus)
        return (
            f"cannot lease {claim}: {user} may hold {most_of_all} at once (most_memory)",
            f"ask for at most --mem {each}" + (" on each GPU" if claim.gpus > 1 else ""),
        )
    return _never_of_host(limits, claim, user)


def _never_of_host(limits: UserLimits, claim: Claim, user: str) -> tuple[str, str] | None:
    ram, cpus = claim.ram or 0, claim.cpus or 0
    if limits.most_ram is not None and ram > limits.most_ram:
        asked, most = f"{format_size(ram)} of RAM", format_size(limits.most_ram)
        setting, hint = "most_ram", f"ask for at most --ram {most}"
    elif limits.most_cpus is not None and cpus > limits.most_cpus:
        asked, most = counted(cpus, "core"), str(limits.most_cpus)
        setting, hint = "most_cpus", f"ask for at most --cpus {most}"
    else:
        return None
    return f"cannot lease {asked}: {user} may hold {most} at once ({setting})", hint


_Account = int | str
"""A user by uid, or a group by name."""


class LimitCheck:
    """The limits of all users in one planning pass; what starts in it counts at once."""

    def __init__(self, limits_of: Mapping[int, UserLimits], largest: int) -> None:
        """Take the limits by uid, and the bytes that the largest GPU offers."""
        self._limits_of = limits_of
        self._largest = largest
        self._held: dict[_Account, Held] = {}
        self._budgets: dict[_Account, OverLimit] = {}
        """The users and groups that have used all of their budgets."""
        self._kept: dict[JobId, Job] = {}
        self._known: dict[tuple[int, Claim, JobId | None], OverLimit | None] = {}
        """Answers until something starts: most claims repeat."""

    @classmethod
    def of(
        cls,
        limits_of: Mapping[int, UserLimits],
        used: Mapping[int, RecentUse],
        holders: Iterable[Job],
        largest: int,
        at: datetime,
    ) -> "LimitCheck":
        """Return a check that knows what is held now, and was `used` by leases that have ended.

        The limits of a group count the users in `limits_of`.
        """
        check = cls(limits_of, largest)
        for job in holders if limits_of else ():
            if job.slurm is None:  # Slurm has limits of its own
                check._count(job, at)
        for uid, limits in limits_of.items():
            check._add_budget(uid, limits, used.get(uid, RecentUse()), at)
        for group, members in check._members_with_budget().items():
            both = RecentUse.sum_of(used[uid] for uid in members if uid in used)
            check._add_budget(group.name, group.limits, both, at)
        return check

    def _members_with_budget(self) -> Mapping[GroupLimits, Sequence[int]]:
        members: dict[GroupLimits, list[int]] = {}
        for uid, limits in self._limits_of.items():
            for group in limits.groups:
                if group.limits.gib_hours_per_week is not None:
                    members.setdefault(group, []).append(uid)
        return members

    def _add_budget(
        self, account: _Account, limits: UserLimits, used: RecentUse, at: datetime
    ) -> None:
        over = over_budget(limits, self._held_by(account), used, at)
        if over is not None:
            self._budgets[account] = over

    @property
    def budgets_last_until(self) -> Collection[datetime]:
        """When enough of the use of each user or group over its budget is a week old."""
        return [over.until_at for over in self._budgets.values() if over.until_at is not None]

    def _count(self, job: Job, at: datetime) -> None:
        self.start(job, sum(lease.memory for lease in job.leases))
        for lease in job.leases:
            ran = at - max(lease.granted_at, at - WEEK)
            gib_hours = lease.memory / GIB * max(0.0, ran / _HOUR)
            for account in self._accounts(job):
                self._held_by(account).gib_hours += gib_hours

    def start(self, job: Job, memory: int) -> None:
        """Count a job that gets so many bytes."""
        for account in self._accounts(job):
            held = self._held_by(account)
            held.running += 1
            held.gpus += job.claim.gpus
            held.memory += memory
            held.ram += job.claim.ram or 0
            held.cpus += job.claim.cpus or 0
            self._known.clear()

    def _accounts(self, job: Job) -> Sequence[_Account]:
        """Return its user and the groups of its user; nothing for a user without limits."""
        limits = self._limits_of.get(job.owner.uid)
        if limits is None:
            return ()
        return (job.owner.uid, *(group.name for group in limits.groups))

    def _held_by(self, account: _Account) -> Held:
        return self._held.setdefault(account, Held())

    def keep_for(self, job: Job) -> None:
        """Leave what a job with a reservation needs: jobs with the same limits must not take it."""
        self._kept[job.id] = job
        self._known.clear()

    def exceeded_by(self, job: Job) -> OverLimit | None:
        """Return the limit that a queued job would exceed if it started now."""
        uid = job.owner.uid
        limits = self._limits_of.get(uid)
        if limits is None:
            return None
        key = uid, job.claim, job.id if job.id in self._kept else None
        if key not in self._known:
            self._known[key] = self._exceeded(job, uid, limits) or next(
                (
                    replace(over, group=each.name)
                    for each in limits.groups
                    if (over := self._exceeded(job, each.name, each.limits)) is not None
                ),
                None,
            )
        return self._known[key]

    def _exceeded(self, job: Job, account: _Account, limits: UserLimits) -> OverLimit | None:
        held = self._held_by(account)
        for kept in self._kept.values():
            if kept.id != job.id and account in self._accounts(kept):
                held = replace(
                    held,
                    running=held.running + 1,
                    gpus=held.gpus + kept.claim.gpus,
                    memory=held.memory + memory_of(kept.claim, self._largest),
                    ram=held.ram + (kept.claim.ram or 0),
                    cpus=held.cpus + (kept.claim.cpus or 0),
                )
        over = over_limit(limits, held, job.claim, self._largest)
        return over or self._budgets.get(account)


_HOUR = timedelta(hours=1)
