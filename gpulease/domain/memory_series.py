"""Memory over time: the spans that samples of jobs are kept in, and series on a regular grid.

Sizes are in bytes. Of each step, a series has the largest value, since peaks matter, and the mean:
the mean of maxima would make a GPU that is busy for 5 of every 60 seconds busy all day. Both are
None where nothing is known.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import ceil
from typing import NamedTuple, TypeVar

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
    first_s: int = 0
    """The range that was asked for: the first and the last step may reach beyond it."""
    last_s: int = 10**12

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
            return Grid(floor, step, points, first, ceil(last))
    raise ValueError("a step as long as the range gives two points")


class Figure(NamedTuple):
    """What is known of one value in a span of time."""

    most: int | None
    sum: int = 0
    """The values, each times the seconds for which it held."""
    seconds: int = 0
    """For which it is known; 0 in rows of releases that kept the largest value alone."""

    def merged(self, other: "Figure") -> "Figure":
        """Return what is known of both spans together."""
        known = [each for each in (self.most, other.most) if each is not None]
        most = max(known, default=None)
        return Figure(most, self.sum + other.sum, self.seconds + other.seconds)

    @property
    def mean(self) -> float | None:
        """The mean over the time for which the value is known."""
        return self.sum / self.seconds if self.seconds else None


NOTHING = Figure(None)
Figures = tuple[Figure, ...]


def held(values: Iterable[int | None], seconds: int) -> Figures:
    """Return values that held for some seconds."""
    return tuple(
        NOTHING if each is None else Figure(each, each * seconds, seconds) for each in values
    )


@dataclass(frozen=True, slots=True)
class Span:
    """What is known of one span of time."""

    at_s: int
    lasts_s: int
    figures: Figures

    def merged(self, other: "Span") -> "Span":
        """Return this with what is known of another span in the same step."""
        figures = tuple(
            one.merged(two) for one, two in zip(self.figures, other.figures, strict=True)
        )
        return Span(self.at_s, max(self.lasts_s, other.lasts_s), figures)


Series = list[int | None]
Means = list[float | None]


@dataclass(frozen=True, slots=True)
class Mean:
    """A value on average."""

    values: Means
    """In each step."""
    overall: float | None
    """Over the range that was asked for, whatever the steps are."""


def cells_of(grid: Grid, spans: Iterable[Span]) -> list[Span | None]:
    """Return what is known of each step.

    A span that is longer than a step is in each of its steps, unless another span begins there.
    """
    own: dict[int, Span] = {}
    longer: dict[int, Span] = {}
    for span in sorted(spans, key=lambda each: each.at_s):
        place = grid.place(span.at_s)
        own[place] = own[place].merged(span) if place in own else span
        last = min(grid.place(span.at_s + span.lasts_s - 1), grid.points - 1)
        for later in range(max(place + 1, 0), last + 1):
            longer[later] = span
    return [own.get(place) or longer.get(place) for place in range(grid.points)]


def series_of(grid: Grid, spans: Iterable[Span], width: int) -> list[tuple[Series, Mean]]:
    """Return the largest and the mean values of each step, for each of `width` values."""
    spans = list(spans)
    cells = [(NOTHING,) * width if cell is None else cell.figures for cell in cells_of(grid, spans)]
    whole = total(grid, spans, width)
    return [
        (
            [cell[number].most for cell in cells],
            Mean([cell[number].mean for cell in cells], whole[number].mean),
        )
        for number in range(width)
    ]


def total(grid: Grid, spans: Iterable[Span], width: int) -> Figures:
    """Return the figures of all spans that begin in the range that was asked for."""
    found: Figures = (NOTHING,) * width
    for span in spans:
        if grid.first_s <= span.at_s < grid.last_s:
            found = tuple(one.merged(two) for one, two in zip(found, span.figures, strict=True))
    return found


@dataclass(frozen=True, slots=True)
class GpuSeries:
    """One GPU over time: the largest values, and all of them on average by their names."""

    owners: Sequence[tuple[str | None, Series]]
    """What the jobs of each user used, the most first; None: the other users together."""
    owner_means: Sequence[Mean]
    """The same on average, in the same order."""
    means: Mapping[str, Mean]
    used: Series
    leased: Series
    committed: Series
    unmanaged: Series
    utilization: Series
    temperature: Series
    power: Series


@dataclass(frozen=True, slots=True)
class JobSeries:
    """What a job used of one GPU over time: the largest values, and all of them on average."""

    means: Mapping[str, Mean]
    used: Series
    pool: Series
    utilization: Series


Number = TypeVar("Number", int, float)


def ranked(owners: Mapping[str, Series]) -> list[str]:
    """Return the users with the most use first."""
    return sorted(owners, key=lambda user: (-sum(filter(None, owners[user])), user))


def by_owner(
    used: Sequence[Number | None],
    owners: Mapping[str, Sequence[Number | None]],
    names: Sequence[str],
    most: int = MOST_OWNERS,
) -> Sequence[tuple[str | None, list[Number | None]]]:
    """Return the series of the first of `names`, and of the others together.

    `used` is the use of the GPU. Jobs that follow each other within a step add up to more than
    that, so their values are reduced in proportion.
    """
    named: list[tuple[str | None, list[Number | None]]] = [
        (user, list(owners[user])) for user in names[:most]
    ]
    if others := [owners[user] for user in names[most:]]:
        named.append((None, [sum(filter(None, cell)) for cell in zip(*others, strict=True)]))
    for place, limit in enumerate(used):
        whole = sum(series[place] or 0 for _, series in named)
        for _, series in named:
            series[place] = _part(series[place] or 0, whole, limit)
    return named


def _part(value: Number, whole: Number, limit: Number | None) -> Number | None:
    if limit is None:
        return None
    return value if whole <= limit else value * limit // whole


def means_of_owners(
    grid: Grid, owners: Mapping[str, Sequence[Span]], names: Sequence[str], used: Mean, known_s: int
) -> Sequence[Mean]:
    """Return the means for `by_owner`: at times without a job, a user uses nothing.

    The spans of `owners` have one figure. `used` is the use of the GPU, known for `known_s` of the
    range that was asked for.
    """
    means = {
        user: [_owner_mean(grid, *each) for each in enumerate(cells_of(grid, spans))]
        for user, spans in owners.items()
    }
    parts = by_owner(used.values, means, names)
    if grid.end_s > grid.last_s:
        _fill_present_step([values for _, values in parts], used.values[-1])
    sums = [total(grid, owners[user], 1)[0].sum for user in names]
    sums = [*sums[:MOST_OWNERS], sum(sums[MOST_OWNERS:])]
    return [
        Mean(values, of / known_s if known_s else None)
        for (_, values), of in zip(parts, sums, strict=False)
    ]


def _fill_present_step(parts: Sequence[Means], used: float | None) -> None:
    """Make the parts of the present step add up to the use of the GPU.

    Its latest sample holds until now, and those of its jobs do not: they would seem to fall.
    """
    whole = sum(values[-1] or 0 for values in parts)
    for values in parts:
        if used is not None and values[-1] is not None and whole:
            values[-1] *= used / whole


def _owner_mean(grid: Grid, place: int, cell: Span | None) -> float | None:
    if cell is None:
        return 0.0
    (used,) = cell.figures
    if not used.seconds:
        return None
    begin_s = grid.begin_s + place * grid.step_s
    if cell.lasts_s > grid.step_s:
        begin_s = cell.at_s
    # The present step, or span, is not over yet.
    whole_s = min(max(cell.lasts_s, grid.step_s), grid.last_s - begin_s)
    return used.sum / max(1, whole_s)


@dataclass(frozen=True, slots=True)
class JobSpan:
    """What a job used of a GPU in one span of `JOB_SPAN_S`."""

    gpu: GpuUuid
    job: JobId
    user: str
    at_s: int
    figures: Figures
    """What it used, what the pools of its frameworks had in use, and its utilization."""

    @property
    def used(self) -> Figure:
        return self.figures[0]


@dataclass(slots=True)
class JobSpans:
    """The spans of jobs that are not on disk yet; of many, the oldest are dropped."""

    most: int
    _spans: dict[tuple[GpuUuid, JobId, int], JobSpan] = field(default_factory=dict)

    def add(self, sample: JobSpan) -> None:
        """Add a sample, which may be at any instant, to the span around it."""
        at_s = sample.at_s // JOB_SPAN_S * JOB_SPAN_S
        key = sample.gpu, sample.job, at_s
        figures = sample.figures
        if before := self._spans.get(key):
            pairs = zip(before.figures, figures, strict=True)
            figures = tuple(one.merged(two) for one, two in pairs)
        self._spans[key] = replace(sample, at_s=at_s, figures=figures)
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
