"""The layers of charts of memory over time, from what the daemon says of a job or a GPU."""

from __future__ import annotations

from gpulease.cli.chart import Layer, Limit
from gpulease.drawing.words import clean
from gpulease.wire.text import user_colour

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpulease.cli.tables import Style
    from gpulease.wire.history import GpuHistoryView, JobGpuSeriesView

    Series = Sequence[int | None]

OTHERS = "others"
NO_LEASE = "no lease"
_OWNERS: tuple[Style, ...] = (
    *("owner0", "owner1", "owner2", "owner3"),
    *("owner4", "owner5", "owner6", "owner7"),
)
_STYLES: dict[str, Style] = {OTHERS: "heading", NO_LEASE: "unmanaged"}


def owner_style(user: str) -> Style:
    """Return the style of a user: the same in every chart and bar."""
    return _OWNERS[user_colour(user)]


PEAK = "peak of use"


def on_average(view: GpuHistoryView | JobGpuSeriesView, name: str) -> Series:
    """Return the means of a series; those of an older daemon are its largest values."""
    mean = view.means.get(name)
    found: Series = getattr(view, name) if mean is None else _rounded(mean.values)
    return found


def job_layers(gpu: JobGpuSeriesView) -> tuple[list[Layer], Limit]:
    """Return what a job held of one GPU, and of that what the pools of its frameworks used."""
    limit, used = Limit("lease", gpu.leased), on_average(gpu, "used")
    peak = _peak(gpu, gpu.used)
    if all(each is None for each in gpu.pool):
        return [*peak, Layer("used", used, "used", "█", "#", averages=True)], limit
    return [
        *peak,
        Layer("held", used, "leased", "▒", "=", averages=True),
        Layer("in use by its framework", gpu.pool, "used", "█", "#"),
    ], limit


def gpu_layers(gpu: GpuHistoryView) -> list[Layer]:
    """Return, each above the next: memory used without a lease, leased but unused, and used."""
    unmanaged = on_average(gpu, "unmanaged")
    used = [_less(*each) for each in zip(on_average(gpu, "used"), unmanaged, strict=True)]
    peak = [_less(*each) for each in zip(gpu.used, gpu.unmanaged, strict=True)]
    # A job may use more than its lease.
    claimed = on_average(gpu, "committed"), on_average(gpu, "leased"), used
    leased = [_largest(*each) for each in zip(*claimed, strict=True)]
    all_of_it = [_sum(*each) for each in zip(leased, unmanaged, strict=True)]
    return [
        Layer(NO_LEASE, _at_most(all_of_it, gpu.total), "unmanaged", "▚", "!", averages=True),
        Layer("leased", _at_most(leased, gpu.total), "leased", "▒", "=", averages=True),
        *_peak(gpu, peak),
        Layer("used", used, "used", "█", "#", averages=True),
    ]


def owner_layers(gpu: GpuHistoryView, *, colour: bool) -> list[Layer]:
    """Return what each user used, above what those used who used more."""
    layers: list[Layer] = []
    below: Series = [None if each is None else 0 for each in on_average(gpu, "used")]
    drawn: set[Style] = set()
    for number, (name, series) in enumerate(_by_owner(gpu)):
        below = [_sum(*each) for each in zip(series, below, strict=True)]
        letter = "!" if name == NO_LEASE else chr(ord("A") + number)
        style = _STYLES.get(name) or owner_style(name)
        # Of two users with one colour, the second is drawn with a letter.
        block = "█" if colour and style not in drawn else letter
        layers.append(Layer(name, below, style, block, letter, averages=True))
        drawn.add(style)
    return [*_peak(gpu, gpu.used), *layers[::-1]]


def _peak(view: GpuHistoryView | JobGpuSeriesView, largest: Series) -> list[Layer]:
    """Return the largest values as a faint band behind the means, if there are means."""
    return [Layer(PEAK, largest, "dim", "░", ".")] if view.means else []


def _by_owner(gpu: GpuHistoryView) -> Iterator[tuple[str, Series]]:
    for owner in gpu.owners:
        name = OTHERS if owner.user is None else clean(owner.user)
        yield name, owner.used if owner.mean is None else _rounded(owner.mean.values)
    if any(gpu.unmanaged) or not gpu.owners:
        yield NO_LEASE, on_average(gpu, "unmanaged")


def _rounded(means: Sequence[float | None]) -> Series:
    return [None if each is None else round(each) for each in means]


def _less(amount: int | None, other: int | None) -> int | None:
    return amount if amount is None or other is None else max(0, amount - other)


def _sum(*amounts: int | None) -> int | None:
    known = [each for each in amounts if each is not None]
    return sum(known) if known else None


def _largest(*amounts: int | None) -> int | None:
    return max((each for each in amounts if each is not None), default=None)


def _at_most(series: Series, total: int | None) -> Series:
    """Return a sum of peaks, which need not have been at one time, within all memory."""
    return [each if each is None or total is None else min(each, total) for each in series]
