"""Windows: which GPUs they get, and what overlaps."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import NOON, reading
from goldens import mentions, sentence
from gpulease.domain.calendar import (
    Calendar,
    Occurrence,
    Stay,
    Window,
    WindowId,
    find_clash,
    users_without_limits,
)
from gpulease.domain.gpu import GpuMemory, GpuUuid, build_ledger

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def window(number: int = 1, gpus: int = 1, *uuids: str, **fields: object) -> Window:
    made = Window(
        WindowId(number), f"w{number}", len(uuids) or gpus, tuple(map(GpuUuid, uuids)),
        NOON + 2 * HOUR, HOUR, None, ("alice",), (), "root", NOON,
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


def occurrence(of: Window, *admits: str) -> Occurrence:
    return Occurrence(of, of.begins_at, of.begins_at + of.lasts_for, frozenset(admits))


def gpus(count: int) -> list[GpuMemory]:
    return [build_ledger(reading(f"GPU-{index}", index), (), {}) for index in range(count)]


def stay(gpu: int, user: str, until: timedelta) -> Stay:
    return Stay(GpuUuid(f"GPU-{gpu}"), user, NOON + until)


def test_a_window_that_names_its_gpus_is_against_other_users_on_these_only() -> None:
    made = occurrence(window(1, 1, "GPU-1"), "alice")
    calendar = Calendar([made], gpus(2))
    assert calendar.first_against("bob", GpuUuid("GPU-1")) is made
    assert calendar.first_against("alice", GpuUuid("GPU-1")) is None
    assert calendar.first_against("bob", GpuUuid("GPU-0")) is None


def why(
    calendar: Calendar, user: str, lasts: timedelta, *, certain: bool = True, alone: bool = True
) -> str | None:
    found = calendar.obstacle(user, gpus(1)[0], NOON, lasts, certain=certain, alone=alone)
    return None if found is None else found.why


def test_the_obstacle_says_which_time_limit_would_do() -> None:
    soon = replace(occurrence(window(1, 1, "GPU-0"), "alice"), begin_text="18:00")
    calendar = Calendar([soon], gpus(1))
    sentence("window ahead", why(calendar, "bob", 3 * HOUR))
    sentence("window ahead, no limit", why(calendar, "bob", 3 * HOUR, certain=False))
    odd = replace(soon, begins_at=NOON + timedelta(hours=1, minutes=7, seconds=9))
    assert mentions(why(Calendar([odd], gpus(1)), "bob", 3 * HOUR), "--time 1h7m")
    wide = why(calendar, "bob", 3 * HOUR, alone=False)
    assert wide is not None
    assert "--time" not in wide, "other GPUs may have other obstacles"
    now = replace(soon, begins_at=NOON + timedelta(seconds=59))
    assert "--time" not in (why(Calendar([now], gpus(1)), "bob", HOUR) or "--time")


def test_while_a_window_is_on_the_obstacle_says_until_when_and_for_whom() -> None:
    on = replace(occurrence(window(1, 1, "GPU-0", begins_at=NOON), "alice"), end_text="Sat 06:00")
    calendar = Calendar([on], gpus(1))
    sentence("window on", why(calendar, "bob", timedelta(seconds=1)))
    assert why(calendar, "alice", 99 * HOUR) is None


def test_a_window_of_a_mig_gpu_covers_its_mig_devices() -> None:
    device = build_ledger(reading("MIG-1", 0, parent=GpuUuid("GPU-0"), mig_index=1), (), {})
    made = occurrence(window(1, 1, "GPU-0"))
    assert Calendar([made], [device]).first_against("bob", GpuUuid("MIG-1")) is made


@pytest.mark.parametrize(
    ("stays", "chosen"),
    [
        ([], ["GPU-0", "GPU-1"]),
        ([stay(0, "bob", HOUR)], ["GPU-0", "GPU-1"]),
        ([stay(0, "bob", 3 * HOUR)], ["GPU-1", "GPU-2"]),
        ([stay(0, "bob", 9 * HOUR), stay(1, "bob", 8 * HOUR)], ["GPU-2", "GPU-1"]),
        ([stay(2, "alice", 9 * HOUR)], ["GPU-2", "GPU-0"]),
    ],
    ids=["free", "free in time", "not free in time", "free first", "used by its user"],
)
def test_a_window_gets_the_gpus_that_other_users_leave_first(
    stays: list[Stay], chosen: list[str]
) -> None:
    calendar = Calendar([occurrence(window(1, 2), "alice")], gpus(3), stays)
    assert list(calendar.gpus[WindowId(1)]) == chosen


def test_a_window_keeps_its_gpus_while_others_are_no_better() -> None:
    before = replace(occurrence(window(), "alice"), gpus_before=(GpuUuid("GPU-1"),))
    assert Calendar([before], gpus(3)).gpus[WindowId(1)] == ("GPU-1",)
    late = [stay(1, "bob", 9 * HOUR)]
    assert Calendar([before], gpus(3), late).gpus[WindowId(1)] == ("GPU-0",)


def test_a_drained_gpu_is_chosen_last() -> None:
    drained = [replace(each, drained="fan") if each.index == 0 else each for each in gpus(2)]
    assert Calendar([occurrence(window())], drained).gpus[WindowId(1)] == ("GPU-1",)


def test_two_windows_at_once_get_different_gpus() -> None:
    named, any_, later = window(1, 1, "GPU-0"), window(2), window(3, begins_at=NOON + 9 * HOUR)
    calendar = Calendar([occurrence(each) for each in (any_, named, later)], gpus(2))
    assert calendar.gpus == {1: ("GPU-0",), 2: ("GPU-1",), 3: ("GPU-0",)}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["alice", "bob"]), st.integers(1, 9))),
    st.integers(1, 4),
)
def test_the_choice_does_not_change_where_jobs_start_only_as_the_calendar_permits(
    there: list[tuple[int, str, int]], count: int
) -> None:
    made = occurrence(window(1, count), "alice")
    stays = [stay(gpu, user, hours * HOUR) for gpu, user, hours in there if user == "bob"]
    before = Calendar([made], gpus(4), stays).gpus[WindowId(1)]
    others = [gpu.index for gpu in gpus(4) if gpu.uuid not in before]
    stays += [stay(gpu, "bob", 9 * HOUR) for gpu in others]
    stays += [Stay(gpu, "bob", made.begins_at) for gpu in before]
    assert Calendar([made], gpus(4), stays).gpus[WindowId(1)] == before


def test_limits_are_lifted_for_the_users_of_a_window_while_it_is_on() -> None:
    free = occurrence(window(lifts_limits=True), "alice")
    both = [free, occurrence(window(2, begins_at=NOON), "bob")]
    assert users_without_limits(both, NOON) == frozenset()
    assert users_without_limits(both, free.begins_at) == {"alice"}
    assert users_without_limits(both, free.ends_at) == frozenset()


def nightly(cron: str, at: datetime) -> datetime:
    assert cron == "nightly"
    return at + (-(at - NOON) % DAY)


def test_a_recurring_window_is_followed_by_its_next_time() -> None:
    made = window(cron="nightly", begins_at=NOON - 9 * DAY, lasts_for=2 * HOUR)
    during, after = NOON + HOUR, NOON + 2 * HOUR
    assert next(made.spans(during, nightly)) == (NOON, NOON + 2 * HOUR)
    assert next(made.spans(after, nightly)) == (NOON + DAY, NOON + DAY + 2 * HOUR)
    assert not made.is_over(NOON + 99 * DAY)


def test_a_recurring_window_does_not_begin_before_its_first_begin() -> None:
    made = window(cron="nightly", begins_at=NOON + 3 * DAY)
    assert next(made.spans(NOON, nightly))[0] == NOON + 3 * DAY


def clash(new: Window, *others: Window, machine: int = 2) -> object:
    spans = [(each, list(each.spans(NOON, nightly))) for each in others]
    found = find_clash(new, new.spans(NOON, nightly), spans, machine)
    return None if found is None else (found[0].id, found[1])


def test_windows_clash_where_they_need_the_same_gpus_at_the_same_time() -> None:
    first = window(1, 1, "GPU-0")
    half = first.begins_at + timedelta(minutes=30)
    assert clash(window(2, 1, "GPU-0", begins_at=half), first) == (1, half)
    assert clash(window(2, 1, "GPU-1", begins_at=half), first) is None
    assert clash(window(2, 1, "GPU-0", begins_at=first.begins_at + HOUR), first) is None
    assert clash(window(2, 1), first) is None
    assert clash(window(2, 2), first) == (1, first.begins_at)
    assert clash(window(3, 1), first, window(2, 1)) is not None


def test_users_and_groups_are_named_in_words() -> None:
    assert window().reserved_for == "alice"
    assert window(users=("a", "b"), groups=("g",)).reserved_for == "a, b and group g"
    assert window(users=()).reserved_for == "no one"
