"""A figure of a benchmark: what was measured, the floor beside it, the goal, and the verdict.

Machines differ and are noisy, so a goal is a ratio to a floor that was measured in the same run, in
alternation; only counts and bytes have goals of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MANY = 10_000
"""Larger numbers are written whole, with commas."""


@dataclass(frozen=True)
class Figure:
    """One line of `make bench`."""

    what: str
    ours: float
    unit: str
    goal: float
    """The highest ratio to the floor; without a floor, the highest value of `ours`."""
    floor: float | None = None
    """In the same unit."""
    floor_is: str = ""
    higher_is_better: bool = False
    """The goal is then the lowest ratio or value."""

    @property
    def measured(self) -> float:
        """What is compared with the goal."""
        return self.ours if self.floor is None else self.ours / self.floor

    @property
    def is_reached(self) -> bool:
        if self.higher_is_better:
            return self.measured >= self.goal
        return self.measured <= self.goal

    def __str__(self) -> str:
        text = f"{self.what}: {_number(self.ours)} {self.unit}"
        limit = f"{'at least' if self.higher_is_better else 'at most'} {_number(self.goal)}"
        if self.floor is not None:
            text += (
                f", {self.floor_is} {_number(self.floor)} {self.unit}, ratio {self.measured:.3g}"
            )
        return f"{text}; goal {limit}: {'reached' if self.is_reached else 'MISSED'}"


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a line for each figure, and one that counts the goals reached."""
    width = max((len(each.what) for each in figures), default=0)
    yield f"{'':{width}}  {'here':>14} {'floor':>14} {'ratio':>8} {'goal':>10}  verdict"
    for each in figures:
        ours = f"{_number(each.ours)} {each.unit}"
        floor = "" if each.floor is None else f"{_number(each.floor)} {each.unit}"
        ratio = "" if each.floor is None else f"{each.measured:.3g}"
        goal = f"{'>=' if each.higher_is_better else '<='} {_number(each.goal)}"
        yield (
            f"{each.what:{width}}  {ours:>14} {floor:>14} {ratio:>8} "
            f"{goal:>10}  {'reached' if each.is_reached else 'MISSED'}"
        )
    yield f"{sum(each.is_reached for each in figures)} of {len(figures)} goals reached"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= _MANY else f"{value:.4g}"
