"""Charts of memory over time, as text."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.cli.chart import Layer, Limit, Times, memory_chart
from gpulease.drawing.words import display_width
from gpulease.units import GIB, KIB

BEGIN = datetime(2026, 11, 22, 21, 18, tzinfo=UTC)
TIMES = Times(BEGIN, 60, UTC)
LEASE = Limit("lease", 8 * GIB)


def used(*values: int | None) -> Layer:
    return Layer("used", values, "used", "█", "#")


def rows_of(chart: str) -> list[str]:
    """Return the rows between the axes, the uppermost first."""
    return [row.partition("┤")[2] or row.partition("│")[2] for row in chart.splitlines()[:-3]]


def drawn(*layers: Layer, limit: Limit | None = LEASE, width: int = 60, height: int = 12) -> str:
    return memory_chart(layers, limit, TIMES, width=width, height=height)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.none() | st.integers(0, 96 * GIB), min_size=1, max_size=1000),
    width=st.integers(20, 200),
    height=st.integers(5, 50),
    limit=st.none() | st.integers(1, 96 * GIB),
)
def test_a_chart_has_the_asked_width_and_height(
    values: list[int | None], width: int, height: int, limit: int | None
) -> None:
    line = None if limit is None else Limit("lease", limit)

    lines = memory_chart(
        [used(*values)], line, TIMES, width=width, height=height, legend=False
    ).splitlines()

    assert len(lines) == height
    assert max(map(display_width, lines)) <= width


def test_what_is_within_the_lease_stays_below_its_line() -> None:
    rows = rows_of(drawn(used(8 * GIB)))

    assert set(rows[0]) == {"─"}
    assert set(rows[1]) == {"█"}


def test_what_is_above_the_lease_crosses_its_line() -> None:
    rows = rows_of(drawn(used(2 * GIB, 12 * GIB)))

    assert rows[0].strip("█ ") == ""
    assert [row for row in rows if "─" in row and "█" in row]


def test_a_little_memory_is_neither_nothing_nor_a_whole_row() -> None:
    assert set(rows_of(drawn(used(108 * KIB)))[-1]) == {"▁"}
    assert not rows_of(drawn(used(0)))[-1].strip()


def test_unknown_memory_is_not_drawn_as_none() -> None:
    chart = drawn(used(GIB, None, 0))

    assert "?" in rows_of(chart)[-1]
    assert "? unknown" in chart
    assert "unknown" not in drawn(used(GIB, 0))


def test_the_largest_of_the_values_in_a_column_is_drawn() -> None:
    values = [0] * 1000
    values[500] = 8 * GIB

    assert any("█" in row for row in rows_of(drawn(used(*values)))[1:2])


def test_without_block_characters_a_chart_is_ascii() -> None:
    layers = [used(GIB, None, 5 * GIB), Layer("pool", [KIB, None, 3 * GIB], "leased", "▒", "=")]

    chart = memory_chart(layers, LEASE, TIMES, width=60, height=12, blocks=False)

    assert chart.isascii()
    assert {"#", "=", "-", "?"} <= set(chart)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0.2, ["21:18:00", "21:18:10", "21:18:20"]),
        (6.0, ["21:20", "21:30", "21:40"]),
        (300.0, ["Nov 23", "06:00", "12:00", "18:00"]),
        (30000.0, ["Dec 20", "Jan 17", "Feb 14"]),
    ],
)
def test_the_labels_of_the_time_are_round(step: float, expected: list[str]) -> None:
    times = Times(BEGIN, step, UTC)

    chart = memory_chart([used(*[GIB] * 288)], LEASE, times, width=80, height=8)

    found = " ".join(chart.splitlines()[-2].split())
    assert all(label in found for label in expected), found


def test_the_times_are_those_of_the_zone() -> None:
    zone = timezone(timedelta(hours=5, minutes=30))

    chart = memory_chart([used(*[GIB] * 60)], LEASE, Times(BEGIN, 60, zone), width=80, height=8)

    assert "03:00" in chart
