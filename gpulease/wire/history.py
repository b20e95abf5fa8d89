"""The shapes of the daemon's answers about memory over time.

A series has one value for each step of time: value `i` of every list is about the `step` seconds
from `begins_at` + `i` x `step` on. It is the largest value in that step, since peaks matter, and
null if none is known. `means` has the averages, which largest values do not give. Sizes are in
bytes.
"""

from dataclasses import dataclass, field

MOST_POINTS = 1000
"""Values in a series at most: the steps of a longer range are longer."""
SOME_POINTS = 300
"""Values in a series, about, unless the request names another number."""


@dataclass(slots=True)
class MeanView:
    """The average of a value over time: a sample counts for as long as it held."""

    values: list[float | None]
    """One for each step of time; null where it is unknown, also where the largest value is known:
    releases before it kept no more."""
    overall: float | None
    """Over the whole range, which does not depend on the steps; null if nothing is known."""


@dataclass(slots=True)
class OwnerSeriesView:
    """What the jobs of one user used of a GPU."""

    user: str | None
    """Null: the users with less use, together."""
    used: list[int | None]
    mean: MeanView | None = None
    """What they used on average. Null from an older daemon."""


@dataclass(slots=True)
class GpuHistoryView:
    """One GPU over time."""

    gpu: str
    label: str
    """The index as shown to people: 0, or 0:1 for a MIG device."""
    name: str
    total: int | None
    begins_at: str
    step: float
    """Seconds."""
    used: list[int | None]
    leased: list[int | None]
    committed: list[int | None]
    unmanaged: list[int | None]
    utilization: list[int | None]
    """Percent."""
    temperature: list[int | None]
    """Degrees Celsius."""
    power: list[int | None]
    """Watts."""
    owners: list[OwnerSeriesView] = field(default_factory=list)
    """The users with the most use first. Together they use at most `used`: jobs that followed each
    other within a step are reduced in proportion."""
    means: dict[str, MeanView] = field(default_factory=dict)
    """By the name of the series: used, leased, committed, unmanaged, utilization, temperature and
    power. Empty from an older daemon."""


@dataclass(slots=True)
class JobGpuSeriesView:
    """What one job used of one GPU."""

    gpu: str
    label: str
    leased: int
    """Bytes."""
    used: list[int | None]
    pool: list[int | None]
    """The most that the memory pools of its frameworks had in use until then, as they reported;
    null if they did not."""
    utilization: list[int | None]
    means: dict[str, MeanView] = field(default_factory=dict)
    """By the name of the series: used, pool and utilization. Empty from an older daemon."""


@dataclass(slots=True)
class JobMemoryView:
    """A job over time, from its start to its end or now."""

    job: int
    label: str
    """The id as people see it: 17, or 17_3 for an element of an array."""
    begins_at: str
    step: float
    """Seconds."""
    gpus: list[JobGpuSeriesView]
