"""The judge of the chaos finds what it is there to find, and no fault in what came late."""

from math import inf

import pytest

from chaos.truth import Listed, Loss, Poll, Shown, Stranger, Truth
from chaos.verdict import Bounds, Grant, Tally, judge

G = 1 << 30
A = "GPU-a"


def truth(*, told: tuple[float, ...] = (99.9,), used: int = 0, **more: object) -> Truth:
    """Return a machine with one GPU of 10 GiB whose memory was told at these times."""
    readings = {A: [(at, used * G) for at in told]}
    polls = [poll(at) for at in (98.0, 99.0, 100.0, 101.0)]
    return Truth({A: 10 * G}, readings=readings, polls=polls, **more)  # type: ignore[arg-type]


def poll(at: float, **figures: object) -> Poll:
    shown: dict[str, object] = {
        "state": "available", "allocatable": 10 * G, "leased": 0, "committed": 0, "unmanaged": 0,
        "headroom": 10 * G, "leased_by_jobs": 0, "used": 0,
    }  # fmt: skip
    return Poll(at - 0.1, at, {A: Shown(**{**shown, **figures})})  # type: ignore[arg-type]


def stranger(since: float, memory: int = 6, until: float = inf) -> Stranger:
    return Stranger((since, since), (until, until), gpu=A, memory=memory * G)


def faults(known: Truth, *grants: Grant) -> list[str]:
    """Return the kinds of faults that the judge finds."""
    known.polls.sort(key=lambda each: each.answered_at)
    tally = Tally(0)
    judge(tally, known, [], grants, Bounds())
    return sorted(tally.faults)


def grant(memory: int, at: float = 100.0, **more: object) -> Grant:
    return Grant(1, A, memory * G, at, None, **more)  # type: ignore[arg-type]


def test_a_grant_of_what_a_stranger_holds_is_a_fault() -> None:
    known = truth(strangers=[stranger(90, until=100.5)])
    known.polls = [poll(100.6)]
    assert faults(known, grant(5)) == ["granted too much"]
    assert faults(truth(strangers=[stranger(90, until=99.95)])) == []


def test_a_stranger_that_came_when_the_daemon_had_looked_is_nobodys_fault() -> None:
    known = truth(strangers=[stranger(99.95, until=100.05)])
    assert faults(known, grant(5)) == []


def test_leases_of_the_same_bytes_are_a_fault_without_any_stranger() -> None:
    known = truth()
    assert faults(known, grant(6, at=99.95), grant(5)) == ["granted too much"]


def test_an_exclusive_grant_beside_a_stranger_is_a_fault() -> None:
    known = truth(strangers=[stranger(90, memory=1, until=100.05)])
    known.polls = [poll(100.6)]
    assert faults(known, grant(1, exclusive=True)) == ["granted too much"]


def test_a_grant_on_an_old_look_is_a_fault_unless_the_machine_was_busy() -> None:
    old = truth(told=(95.0,))
    old.polls = [poll(95 + n / 10) for n in range(60)]
    assert faults(old, grant(1)) == ["granted on an old look"]
    busy = truth(told=(95.0,))
    busy.polls = [poll(94.0), poll(100.0)]
    assert faults(busy, grant(1)) == []


def test_a_grant_on_a_gpu_that_was_lost_is_a_fault() -> None:
    known = truth(told=(79.0,), losses=[Loss((80, 80), (100.05, 100.05), gpu=A)])
    known.polls = [poll(n / 10, state="lost") for n in range(780, 1000)]
    assert faults(known, grant(1)) == ["granted on a lost GPU", "granted on an old look"]


def test_a_gpu_that_has_long_been_lost_and_is_shown_as_there_is_a_fault() -> None:
    known, tally = truth(told=(79.0,), losses=[Loss((80, 80), (101, 101), gpu=A)]), Tally(0)
    known.polls = [poll(80 + n / 10) for n in range(150)]
    judge(tally, known, [], [], Bounds())
    first = float(tally.told[0].partition(" at ")[2].partition(": ")[0])
    assert sorted(tally.faults) == ["lost and shown as there"]
    assert 80 + Bounds().shown_s <= first < 88


@pytest.mark.parametrize(
    ("figures", "kind"),
    [
        ({"headroom": 11 * G}, "sums do not add up"),
        ({"leased": G}, "sums do not add up"),
        ({"unmanaged": None}, "sums do not add up"),
        ({"unmanaged": 5 * G, "headroom": 5 * G}, "stranger not counted"),
    ],
)
def test_a_status_that_does_not_add_up_or_leaves_a_stranger_out_is_a_fault(
    figures: dict[str, object], kind: str
) -> None:
    known = truth(told=(97.0, 99.0), used=6, strangers=[stranger(96)])
    shown = {"unmanaged": 6 * G, "headroom": 4 * G, "used": 6 * G, **figures}
    known.polls = [poll(100.0, **shown)]
    assert faults(known) == [kind]


def test_more_than_there_is_is_a_fault_unless_a_stranger_came_after_the_last_grant() -> None:
    def known(since: float) -> Truth:
        made = truth(told=(99.9, 100.2), strangers=[stranger(since)])
        more = {"leased": 5 * G, "leased_by_jobs": 5 * G, "committed": 5 * G}
        made.polls = [poll(100.9, unmanaged=6 * G, headroom=0, **more)]
        return made

    assert faults(known(100.1), grant(5)) == []
    assert faults(known(90), grant(5)) == ["granted too much", "more than there is"]


def test_a_jobs_process_may_pass_for_a_stranger_in_one_look_and_not_in_two() -> None:
    stray = {"processes": (Listed(7, 6 * G, None),), "unmanaged": 6 * G, "headroom": 0}
    figures = {"leased": 6 * G, "leased_by_jobs": 6 * G, "committed": 6 * G, **stray}

    def judged(read_again: int) -> Tally:
        known, tally = truth(), Tally(0)
        known.readings[A] = [(99.9, 6 * G), (102.0, read_again * G)]
        known.polls = [poll(100 + n / 10, **figures, used=6 * G) for n in range(1, 20)]
        known.polls += [poll(102.5 + n / 10, **figures, used=read_again * G) for n in range(1, 20)]
        judge(tally, known, [], [grant(6)], Bounds())
        return tally

    assert (judged(6).told, judged(6).counted_twice) == ([], 38), "it may be the same look"
    assert (sorted(judged(7).faults), judged(7).counted_twice) == (["more than there is"], 19)


def test_a_status_may_show_a_look_that_is_as_old_as_the_timer_allows() -> None:
    known = truth(told=(97.0,), strangers=[stranger(98)])
    known.readings[A].append((99.0, 6 * G))
    known.polls = [poll(100.0)]
    assert faults(known) == []
