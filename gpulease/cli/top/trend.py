"""The last minutes of one value of a GPU, as a sparkline. Pure; the time is an argument."""

from collections.abc import Sequence
from dataclasses import dataclass, field

STEP_S = 10
"""Seconds for each character. A sparkline moves at each step and not at each look, which sends less
over ssh."""
MOST = 120
"""Steps that are kept: 20 minutes."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class Trend:
    """The largest percentage of each step of time."""

    steps: dict[int, float] = field(default_factory=dict)
    """By the number of the step since the epoch."""

    def put(self, at: float, value: float | None) -> None:
        """Take in what was seen at an instant, in seconds since the epoch."""
        if value is None:
            return
        step = int(at // STEP_S)
        self.steps[step] = max(value, self.steps.get(step, 0.0))
        if len(self.steps) > MOST:
            del self.steps[min(self.steps)]

    def fill(self, begins_at: float, step: float, values: Sequence[float | None]) -> None:
        """Take in a series of the daemon's history, from `begins_at` on."""
        for number, value in enumerate(values):
            begin = begins_at + number * step
            for after in range(0, max(1, int(step)), STEP_S):
                self.put(begin + after, value)

    def last(self, count: int, now: float) -> list[float | None]:
        """Return the last `count` steps, the present one last; None where nothing is known."""
        step = int(now // STEP_S)
        return [self.steps.get(each) for each in range(step - count + 1, step + 1)]


def sparkline(values: Sequence[float | None]) -> str:
    """Draw percentages, one character each; what is unknown stays empty."""
    last = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[min(last, max(0, int(value * len(_BLOCKS) / 100)))]
        for value in values
    )
