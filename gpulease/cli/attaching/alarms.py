"""Things to be done later, by whoever sits in poll(2) until then."""

import time
from collections.abc import Callable


class Alarms:
    """At most one of each name."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` called in so many seconds."""
        self._set[name] = (time.monotonic() + seconds, call)

    def drop(self, name: str) -> None:
        """Forget what was to be done."""
        self._set.pop(name, None)

    def patience(self, *others: float) -> float | None:
        """Return for how many milliseconds nothing has to happen; `others` are seconds."""
        now = time.monotonic()
        spans = [*(at - now for at, _ in self._set.values()), *others]
        return max(0.0, min(spans)) * 1000 + 1 if spans else None

    def ring(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for name in [name for name, (at, _) in self._set.items() if at <= now]:
            self._set.pop(name)[1]()
