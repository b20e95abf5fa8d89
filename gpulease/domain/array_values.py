"""What tells the elements of an array apart: the index, and the values of a grid.

A grid has some values for each name, and an element for each combination of them.
"""

from collections.abc import Mapping, Sequence
from math import prod

Grid = Mapping[str, tuple[str, ...]]
"""The values by their names."""


def size_of(grid: Grid) -> int:
    """Return the number of combinations."""
    return prod(map(len, grid.values()))


def values_of(grid: Grid, index: int) -> dict[str, str]:
    """Return the values of the element with an index; those of the last name change fastest."""
    found: dict[str, str] = {}
    for name, values in reversed(list(grid.items())):
        index, place = divmod(index, len(values))
        found[name] = values[place]
    return {name: found[name] for name in grid}


def suffix_of(grid: Grid, index: int) -> str:
    """Return what the name of an element has behind that of the array: " lr=1e-3 seed=0"."""
    return "".join(f" {name}={value}" for name, value in values_of(grid, index).items())


def command_of_element(argv: Sequence[str], grid: Grid, index: int) -> tuple[str, ...]:
    """Return a command with `{}` replaced by the index and `{NAME}` by a value.

    In words with spaces, which are programs of a shell or of Python, `{}` has other meanings.
    """
    values = {f"{{{name}}}": value for name, value in values_of(grid, index).items()}
    return tuple(_replaced(word, values, index) for word in argv)


def _replaced(word: str, values: Mapping[str, str], index: int) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word if any(map(str.isspace, word)) else word.replace("{}", str(index))
