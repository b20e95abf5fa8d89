"""What tells the elements of an array apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.cli.array_command import grid_doubts
from gpulease.domain.array_values import command_of_element, size_of, suffix_of, values_of
from gpulease.errors import BadValue
from gpulease.options import grid_values

GRID = {"lr": ("1e-3", "1e-4"), "seed": ("0", "1", "2")}


@given(
    st.dictionaries(
        st.text(min_size=1), st.lists(st.text(), min_size=1, max_size=5, unique=True), max_size=4
    )
)
def test_each_element_has_one_combination_and_each_combination_an_element(
    values: dict[str, list[str]],
) -> None:
    grid = {name: tuple(each) for name, each in values.items()}
    found = {tuple(values_of(grid, index).values()) for index in range(size_of(grid))}
    assert len(found) == size_of(grid)


def test_the_values_of_the_last_name_change_fastest() -> None:
    assert [suffix_of(GRID, index) for index in (0, 1, 3)] == [
        " lr=1e-3 seed=0", " lr=1e-3 seed=1", " lr=1e-4 seed=0",
    ]  # fmt: skip
    assert suffix_of({}, 7) == ""


def test_values_and_the_index_are_put_into_the_command() -> None:
    argv = ("train.py", "--lr={lr}", "{seed}", "out/{}", "{other}", "sh -c 'echo {} {lr}'")
    assert command_of_element(argv, GRID, 4) == (
        "train.py", "--lr=1e-4", "1", "out/4", "{other}", "sh -c 'echo {} 1e-4'",
    )  # fmt: skip


def test_a_range_of_numbers_is_several_values() -> None:
    assert grid_values(["lr=1e-3,1e-4", "seed=0-2,7", "x=a-b"]) == {
        "lr": ["1e-3", "1e-4"], "seed": ["0", "1", "2", "7"], "x": ["a-b"],
    }  # fmt: skip


@pytest.mark.parametrize("given", [["lr"], ["=1"], ["lr="], ["lr=1,,2"], ["1r=1"], ["a=1", "a=2"]])
def test_what_is_no_grid_is_refused(given: list[str]) -> None:
    with pytest.raises(BadValue, match="--grid"):
        grid_values(given)


def test_a_name_that_the_grid_does_not_have_is_said() -> None:
    typed = ["train.py", "{lr}", "{LR}", '{"a": 1}', "{}"]
    assert [*grid_doubts(["lr=1,2"], typed)] == ["gpulease: {LR} stays as it is: --grid has lr"]
