"""Which GPUs of a server a job on several of them gets, by the links between these.

A link is between two GPUs, so no score of one GPU can express it. This chooses among GPUs that fit,
and never has a job wait, unless it asks for linked GPUs. It takes 0.1 ms for 8 GPUs, so it is for
those that a job gets, and not for finding out whether it fits.
"""

from collections.abc import Iterator, Sequence, Set

from gpulease.domain.gpu import PATHS, GpuReading


def best_linked(
    gpus: Sequence[GpuReading], costs: Sequence[float], count: int, *, by_nvlink: bool
) -> Sequence[int] | None:
    """Return the places of `count` GPUs with the best weakest link, then with the most links.

    Where NVLinks are equal, the costs decide, then the way through PCI Express, then the places. A
    set grows from each GPU by the one that is linked best with it: all sets would be too many.

    Args:
        gpus: at least `count`, in ascending order of cost.
        costs: of each GPU.
        count: at least two.
        by_nvlink: whether each two have to be linked by NVLink; None if they cannot be.
    """
    between = _links_between(gpus)
    # As on a machine about which nothing is known, where the first are the best.
    is_even = len({link for row in between for link in row if link is not None}) == 1
    sets = (_grown(between, costs, start, count) for start in range(len(gpus)))
    found = range(count) if is_even else max(sets, key=lambda each: each[0])[1]
    if by_nvlink and not fewest_nvlinks([gpus[place] for place in found]):
        return linked_set(gpus, count)
    return sorted(found)


_Link = tuple[int, int]
"""NVLinks, and the nearness through PCI Express."""
_Rating = tuple[int, int, float, int, int, int]
"""NVLinks of the weakest link and of all, the cost below zero, the nearness of the farthest two and
of all, and the place below zero."""


def _links_between(gpus: Sequence[GpuReading]) -> list[list[_Link | None]]:
    """Return the link between each two GPUs; None of a GPU with itself."""
    links = [{link.gpu: (link.nvlinks, link.nearness) for link in gpu.links} for gpu in gpus]
    return [
        [None if one == other else known.get(gpu.uuid, (0, 0)) for other, gpu in enumerate(gpus)]
        for one, known in enumerate(links)
    ]


def _grown(
    between: Sequence[Sequence[_Link | None]], costs: Sequence[float], start: int, count: int
) -> tuple[_Rating, Sequence[int]]:
    """Return the set that grows from one GPU, and how good it is."""
    # Of each GPU that is left, how good it is beside those of the set.
    left: dict[int, _Rating] = {
        place: (link[0], link[0], -costs[place], link[1], link[1], -place)
        for place, link in enumerate(between[start])
        if link is not None
    }
    chosen = [start]
    weakest, nvlinks, cost, farthest, near = 1 << 30, 0, -costs[start], len(PATHS), 0
    while True:
        added = max(left, key=left.__getitem__)
        low, more, spent, far, nearer, _ = left.pop(added)
        chosen.append(added)
        weakest, nvlinks, cost = min(weakest, low), nvlinks + more, cost + spent
        farthest, near = min(farthest, far), near + nearer
        if len(chosen) == count:
            return (weakest, nvlinks, cost, farthest, near, -start), chosen
        row = between[added]
        for place, (low, more, spent, far, nearer, last) in left.items():
            links, paths = row[place] or (0, 0)
            left[place] = (
                min(low, links), more + links, spent, min(far, paths), nearer + paths, last,
            )  # fmt: skip


def fewest_nvlinks(gpus: Sequence[GpuReading]) -> int:
    """Return the NVLinks between those two of some GPUs that have the fewest; 0 of one alone."""
    links = [{link.gpu: link.nvlinks for link in gpu.links} for gpu in gpus]
    found = (
        known.get(gpu.uuid, 0) for place, known in enumerate(links) for gpu in gpus[place + 1 :]
    )
    return min(found, default=0)


def linked_set(gpus: Sequence[GpuReading], count: int) -> Sequence[int] | None:
    """Return the places of `count` GPUs of which each two are linked by NVLink; None: too few."""
    return next(_linked_sets(_nvlinked(gpus), count), None)


def _nvlinked(gpus: Sequence[GpuReading]) -> list[Set[int]]:
    """Return the places of the GPUs that are linked with each GPU by NVLink."""
    places = {gpu.uuid: place for place, gpu in enumerate(gpus)}
    return [
        {places[link.gpu] for link in gpu.links if link.nvlinks and link.gpu in places}
        for gpu in gpus
    ]


def _linked_sets(
    linked: Sequence[Set[int]], count: int, chosen: tuple[int, ...] = ()
) -> Iterator[Sequence[int]]:
    """Yield the sets of places of which each two are linked, beginning with those chosen."""
    if len(chosen) == count:
        yield chosen
        return
    able = set(range(chosen[-1] + 1 if chosen else 0, len(linked)))
    for place in chosen:
        able &= linked[place]
    if len(chosen) + len(able) >= count:
        for place in sorted(able):
            yield from _linked_sets(linked, count, (*chosen, place))
