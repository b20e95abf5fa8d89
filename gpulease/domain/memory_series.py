"""Memory over time: the spans that samples of jobs are kept in, and series on a regular grid.

Sizes are in bytes. A value of a series is the largest of its step, since peaks matter, and None if
none is known.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from gpulease.domain.gpu import GpuUuid, JobId

JOB_SPAN_S = 10
"""The finest span of a job's memory; spans begin at multiples of their length."""
HOLDS_FOR_S = 60
"""A sample of a GPU holds until the next, at most for this time: an idle machine takes few."""
MOST_OWNERS = 8
"""Users of a GPU that get a series each."""
_DAY_S = 86400
_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 900, 1800, 3600, 7200, 14400, 28800, 43200)
"""Each is a multiple of all spans that are shorter, or a part of them: no step is left empty."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The steps of a series. They begin at multiples of their length, in each series."""

    begin_s: int
    """Seconds since 1970."""
    step_s: int
    points: int

    @property
    def end_s(self) -> int:
        return self.begin_s + self.step_s * self.points

    @property
    def begins_at(self) -> datetime:
        return datetime.fromtimestamp(self.begin_s, UTC)

    def place(self, at_s: int) -> int:
        """Return the step of an instant; it may be outside."""
        return (at_s - self.begin_s) // self.step_s


def grid_over(begin: datetime, end: datetime, most: int, least_s: int = 1) -> Grid:
    """Return the finest grid over a range, with steps of `least_s` or more.

    It has at most `most` steps, which is 2 or more.
    """
    first, last = int(begin.timestamp()), max(end.timestamp(), begin.timestamp() + 1)
    days = (_DAY_S * number for number in range(1, int(last - first) // _DAY_S + 2))
    for step in (*_STEPS_S, *days):
        floor = first // step * step
        points = int(-((floor - last) // step))
        if points <= most and step >= least_s:
            return Grid(floor, step, points)
    raise ValueError("a step as long as the range gives two points")


Values = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """What is known of one span of time: the largest values in it."""

    at_s: int
    lasts_s: int
    values: Values


Series = list[int | None]


def series_of(grid: Grid, spans: Iterable[Span], width: int) -> list[Series]:
    """Return a series for each of `width` values.

    A span that is longer than a step is in each of its steps, unless another span begins there.
    """
    own: dict[int, Values] = {}
    longer: dict[int, Values] = {}
    for span in sorted(spans, key=lambda each: each.at_s):
        place = grid.place(span.at_s)
        own[place] = _largest(own[place], span.values) if place in own else span.values
        last = min(grid.place(span.at_s + span.lasts_s - 1), grid.points - 1)
        for later in range(max(place + 1, 0), last + 1):
            longer[later] = span.values
    nothing: Values = (None,) * width
    cells = [own.get(place) or longer.get(place) or nothing for place in range(grid.points)]
    return [[cell[number] for cell in cells] for number in range(width)]


def _largest(one: Values, other: Values) -> Values:
    return tuple(_larger(*pair) for pair in zip(one, other, strict=True))


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


@dataclass(frozen=True, slots=True)
class GpuSeries:
    """One GPU over time."""

    owners: Sequence[tuple[str | None, Series]]
    """What the jobs of each user used, the most first; None: the other users together."""
    used: Series
    leased: Series
    committed: Series
    unmanaged: Series
    utilization: Series
    temperature: Series
    power: Series


@dataclass(frozen=True, slots=True)
class JobSeries:
    """What a job used of one GPU over time."""

    used: Series
    pool: Series
    utilization: Series


def by_owner(
    used: Series, owners: Mapping[str, Series], most: int = MOST_OWNERS
) -> Sequence[tuple[str | None, Series]]:
    """Return the series of the users with the most use, and of the others together.

    `used` is the use of the GPU. Jobs that follow each other within a step add up to more than
    that, so their values are reduced in proportion.
    """
    ranked = sorted(owners, key=lambda user: (-sum(filter(None, owners[user])), user))
    named: list[tuple[str | None, Series]] = [(user, list(owners[user])) for user in ranked[:most]]
    if others := [owners[user] for user in ranked[most:]]:
        named.append((None, [sum(filter(None, cell)) for cell in zip(*others, strict=True)]))
    for place, limit in enumerate(used):
        whole = sum(series[place] or 0 for _, series in named)
        for _, series in named:
            series[place] = _part(series[place] or 0, whole, limit)
    return named


def _part(value: int, whole: int, limit: int | None) -> int | None:
    if limit is None:
        return None
    return value if whole <= limit else value * limit // whole


@dataclass(frozen=True, slots=True)
class JobSpan:
    """What a job used of a GPU in one span of `JOB_SPAN_S`."""

    gpu: GpuUuid
    job: JobId
    user: str
    at_s: int
    used: int | None
    pool: int | None
    """What the pools of its frameworks had in use."""
    utilization: int | None


@dataclass(slots=True)
class JobSpans:
    """The spans of jobs that are not on disk yet; of many, the oldest are dropped."""

    most: int
    _spans: dict[tuple[GpuUuid, JobId, int], JobSpan] = field(default_factory=dict)

    def add(self, sample: JobSpan) -> None:
        """Add a sample, which may be at any instant, to the span around it."""
        at_s = sample.at_s // JOB_SPAN_S * JOB_SPAN_S
        key = sample.gpu, sample.job, at_s
        before = self._spans.get(key, sample)
        self._spans[key] = replace(
            sample,
            at_s=at_s,
            used=_larger(before.used, sample.used),
            pool=_larger(before.pool, sample.pool),
            utilization=_larger(before.utilization, sample.utilization),
        )
        while len(self._spans) > self.most:
            del self._spans[next(iter(self._spans))]

    def all(self) -> Sequence[JobSpan]:
        """Return the spans, the present ones included."""
        return tuple(self._spans.values())

    def over(self, now: datetime) -> Sequence[JobSpan]:
        """Return the spans to which no sample is added any more, not even a late one."""
        oldest_s = int(now.timestamp()) - 2 * JOB_SPAN_S
        return tuple(
            each
            for each in self._spans.values()
            # A span in the future is from before the clock was set back.
            if not oldest_s < each.at_s <= now.timestamp()
        )

    def written(self, spans: Iterable[JobSpan]) -> None:
        """Note that `spans` are on disk."""
        for each in spans:
            self._spans.pop((each.gpu, each.job, each.at_s), None)
