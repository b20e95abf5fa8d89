"""Sizes and spans as people write them."""

from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldens import mentions
from gpulease.errors import BadValue
from gpulease.units import (
    GIB,
    MIB,
    Share,
    format_above,
    format_size,
    format_span,
    parse_instant,
    parse_memory,
    parse_setting_span,
    parse_size,
    parse_span,
    round_up_size,
)


@pytest.mark.parametrize("text", ["4G", "4g", "4GiB", "4GB", "4096M", " 4 G ", "4.0G"])
def test_all_the_ways_to_write_four_gibibytes_mean_the_same(text: str) -> None:
    assert parse_size(text) == 4 * GIB


@pytest.mark.parametrize(
    "text", ["", " ", "0", "0G", "-1G", "4X", "G", "4GG", "1e3", "999999T", "٤G", "4\nG ", "nan"]
)
def test_what_is_no_size_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(BadValue) as refused:
        parse_memory(text)
    assert refused.value.hint
    assert "\n" not in refused.value.message


def test_a_share_is_proposed_only_where_one_will_do() -> None:
    for read, proposed in ((parse_memory, True), (parse_size, False)):
        with pytest.raises(BadValue) as refused:
            read("much")
        assert ("40%" in (refused.value.hint or "")) is proposed


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%"])
def test_a_share_is_above_nothing_and_at_most_all(text: str) -> None:
    with pytest.raises(BadValue) as refused:
        parse_memory(text)
    assert ("--gpus 2" in (refused.value.hint or "")) is (text == "101%")


def test_a_share_of_a_gpu_is_rounded_down_to_whole_mebibytes() -> None:
    assert parse_memory("40%") == Share(Fraction(40))
    assert Share(Fraction(40)).of(8 * GIB) == 3276 * MIB


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_is_refused_and_nothing_else_happens(text: str) -> None:
    try:
        size = parse_size(text)
    except BadValue:
        return
    assert size > 0


@given(st.integers(min_value=1, max_value=1 << 49))
def test_a_size_that_is_shown_can_be_asked_for_and_is_no_more_than_there_is(size: int) -> None:
    shown = format_size(size)
    assert 0 < parse_size(shown) <= size


@given(st.integers(min_value=10, max_value=9999), st.sampled_from("KMGT"))
def test_a_size_with_one_decimal_is_shown_as_it_was_written(tenths: int, unit: str) -> None:
    whole, tenth = divmod(tenths, 10)
    text = f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}"
    assert format_size(parse_size(text)) == text


@given(st.integers(min_value=1, max_value=1000 * GIB))
def test_an_advised_size_is_round_and_written_without_loss(size: int) -> None:
    advised = round_up_size(size)
    assert size <= advised < size + max(GIB, size // 8)
    assert round_up_size(advised) == advised
    assert parse_size(format_size(advised)) == advised


def test_a_size_above_a_limit_does_not_read_as_the_limit() -> None:
    assert format_above(1030 * MIB, GIB) == "1030M"
    assert format_above(1200 * MIB, GIB) == "1.1G"
    assert format_above(GIB, GIB) == "1G"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("4h", 14400), ("1d12h", 129600), ("04:30:00", 16200),
     ("1-00:00:00", 86400), ("1-12:00", 129600)],
)  # fmt: skip
def test_times_are_read_as_slurm_and_sleep_write_them(text: str, seconds: int) -> None:
    assert parse_span(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(("text", "is_meant"), [("4", True), ("72", True), ("3600", False)])
def test_a_small_time_without_a_unit_may_be_hours(text: str, is_meant: bool) -> None:
    with pytest.raises(BadValue) as refused:
        parse_span(text)
    assert (f"{text}h," in (refused.value.hint or "")) is is_meant


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("4", "4m", "4s"),
        ("1:30", "1h30m", "90s"),
        ("90:05", "90h05m", "5405s"),
    ],
)
def test_a_time_that_others_read_otherwise_is_refused_with_both_meanings(
    text: str, first: str, second: str
) -> None:
    with pytest.raises(BadValue) as refused:
        parse_span(text)
    assert mentions(refused.value.hint or "", f"{first},", f"{second}?")
    assert parse_span(first) != parse_span(second)
    assert parse_setting_span(text) in (parse_span(first), parse_span(second))


@pytest.mark.parametrize(
    ("text", "meant"),
    [("4", "4G"), ("1.5", "1.5G"), ("192", "192G"), ("512", "512M"), ("4096", "4096M")],
)
def test_a_size_without_a_unit_is_refused_with_what_was_probably_meant(
    text: str, meant: str
) -> None:
    for read in (parse_size, parse_memory):
        with pytest.raises(BadValue) as refused:
            read(text)
        assert mentions(refused.value.hint or "", f"{meant}?")


@pytest.mark.parametrize("text", ["", "0", "-1h", "4x", "h", "99999999999999h", "4000d", "1h30"])
def test_what_is_no_time_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(BadValue) as refused:
        parse_span(text)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("span", "shown"),
    [
        (0, "0s"),
        (125, "2m 5s"),
        (5400, "1h 30m"),
        (187_200, "2d 4h"),
        (86_401, "1d 1s"),
    ],
)
def test_a_span_is_shown_by_its_two_largest_units(span: int, shown: str) -> None:
    assert format_span(timedelta(seconds=span)) == shown


FRIDAY_NOON = datetime(2026, 3, 27, 11, tzinfo=UTC)
"""In Berlin; the clocks change on the Sunday after it."""


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("now", "27 12:00 +0100"),
        ("+2h", "27 14:00 +0100"),
        ("18:00", "27 18:00 +0100"),
        ("9:30", "28 09:30 +0100"),
        ("fri 18:00", "27 18:00 +0100"),
        ("Friday 11:00", "03 11:00 +0200"),
        ("2026-03-29 9:00", "29 09:00 +0200"),
        ("2026-03-28t9:00z", "28 10:00 +0100"),
        ("2026-03-29", "29 00:00 +0100"),
        ("2026-03-28T18:00:00Z", "28 19:00 +0100"),
        ("+2d", "29 13:00 +0200"),
    ],
)
def test_a_point_in_time_is_the_next_one_in_the_time_zone_of_the_machine(
    text: str, found: str
) -> None:
    assert f"{parse_instant(text, FRIDAY_NOON).astimezone():%d %H:%M %z}" == found


@pytest.mark.parametrize(
    "text",
    ["", "25:00", "18", "noon 18:00", "2026-13-01", "+", "+2x", "18:00 fri", "9" * 99],
)
def test_what_is_no_point_in_time_is_refused(text: str) -> None:
    with pytest.raises(BadValue) as refused:
        parse_instant(text, FRIDAY_NOON)
    assert refused.value.hint
