"""The real spawner, whose shims cross points; started in its place by a wounded daemon."""

from collections.abc import Callable
from typing import Any

from gpulease.shim import spawner
from gpulease.shim.record import JobEvents
from torture.points import cross


def wound(owner: Any, name: str, before: str | None, after: str | None) -> None:
    """Cross a point before and after each call of a function."""
    real: Callable[..., Any] = getattr(owner, name)

    def wounded(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            cross(before)
        result = real(*arguments, **named)
        if after is not None:
            cross(after)
        return result

    setattr(owner, name, wounded)


def _wound_the_writing() -> None:
    real = JobEvents.write

    def write(self: JobEvents, sync: bool = True) -> None:
        real(self, sync)
        if self.exited is not None:
            cross("shim: when the end is written")
        elif self.main_exited is None and self.stopping is None:
            cross("shim: when the start is written")

    JobEvents.write = write  # type: ignore[method-assign]


if __name__ == "__main__":
    wound(spawner, "claim", "shim: before its claim", "shim: after its claim")
    wound(spawner, "start_worker", "shim: before it forks", "shim: after it has forked")
    wound(JobEvents, "note_start", "shim: before the start is noted", None)
    wound(JobEvents, "note_end", "shim: before the end is noted", None)
    _wound_the_writing()
    spawner.main()
