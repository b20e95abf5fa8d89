"""Records behave as the dataclasses that type checkers take them for."""

import pytest

from gpulease.record import record, replace


@record
class Point:
    x: int
    y: int = 2


@record(frozen=True)
class Name:
    text: str = ""


def test_fields_are_given_by_place_or_name_and_have_defaults() -> None:
    assert vars(Point(1)) == {"x": 1, "y": 2}
    assert Point(1, 3) == Point(y=3, x=1)
    assert repr(Point(1)) == "Point(x=1, y=2)"


def test_records_are_equal_by_kind_and_value() -> None:
    assert Point(1) != Point(2)
    assert Name() != ""
    assert {Name("a"), Name("a")} == {Name("a")}
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1))


@pytest.mark.parametrize(
    "call",
    [
        Point,
        lambda: Point(1, 2, 3),
        lambda: Point(1, x=1),
        lambda: Point(1, z=1),
        lambda: replace(Point(1), z=1),
    ],
)
def test_wrong_fields_are_refused(call: object) -> None:
    with pytest.raises(TypeError):
        call()  # type: ignore[operator]
