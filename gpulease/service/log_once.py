"""What is wrong is said to the log once, until it passes or is something else.

Everything that is tried again says through this that it fails, so that one fault is one line for an
admin, however often it is met. What is not said again is there at the debug level.
"""

import logging
from collections.abc import Hashable


class LogOnce:
    """Remembers what it has said of each thing."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[Hashable, set[str]] = {}

    def say(
        self,
        about: Hashable,
        text: str,
        *,
        why: str | None = None,
        bug: BaseException | None = None,
        level: int = logging.WARNING,
    ) -> None:
        """Say `text`, unless the same was said about this since it last passed.

        `why` is what makes it the same, where the text names a job or the like. `bug` is shown with
        its traceback.
        """
        said = self._said.setdefault(about, set())
        key = text if why is None else why
        is_new = key not in said
        said.add(key)
        self._log.log(level if is_new else logging.DEBUG, "%s", text, exc_info=bug)

    def passed(self, about: Hashable) -> bool:
        """Note that this is in order now; return whether it had been complained of."""
        return self._said.pop(about, None) is not None
