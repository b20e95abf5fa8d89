"""The placement policies that a replay compares."""

from fakes import G, reading
from gpulease.domain.gpu import build_ledger
from gpulease.domain.lease import Claim
from gpulease.domain.rooms import Room, best_fit
from gpulease.replay.placements import placement_named, spread
from gpulease.replay.trace import TraceJob


def room(free: int) -> Room:
    """Return a GPU of 8 GiB with so much free."""
    made = Room(build_ledger(reading(), (), {}, 0, None, frozenset()), 0)
    if free < 8 * G:
        made.take(8 * G - free, False, None)
    return made


def trace(*sizes: int) -> list[TraceJob]:
    return [TraceJob(number, 0, 60, 1, size, "a") for number, size in enumerate(sizes)]


def test_spread_prefers_the_emptiest_gpu_and_best_fit_the_fullest() -> None:
    full, empty = room(2 * G), room(8 * G)

    assert spread(Claim(G), empty) > spread(Claim(G), full)
    assert best_fit(Claim(G), full) > best_fit(Claim(G), empty)


def test_fgd_keeps_room_for_the_sizes_that_are_typical() -> None:
    score = placement_named("fgd", trace(4 * G, 4 * G))
    # 2G of the first leave 3G, which no typical job can use; of the second, 4G, which one can.
    tight, exact = room(5 * G), room(6 * G)

    assert best_fit(Claim(2 * G), tight) > best_fit(Claim(2 * G), exact)
    assert score(Claim(2 * G), exact) > score(Claim(2 * G), tight)
