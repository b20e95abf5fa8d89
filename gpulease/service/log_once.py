"""Logs a repeated failure once, until it passes or changes.

Everything that is retried logs its failures through this, so that one fault is one line for an
admin. Repetitions are logged at the debug level.
"""

import logging
from collections.abc import Hashable


class LogOnce:
    """Remembers what it has logged about each subject."""

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
        """Log `text`, unless the same was logged about this subject since it last passed.

        Args:
            about: the subject.
            why: what identifies the failure, where `text` also names a job or the like.
            bug: an exception to log with its traceback.
        """
        said = self._said.setdefault(about, set())
        key = text if why is None else why
        is_new = key not in said
        said.add(key)
        self._log.log(level if is_new else logging.DEBUG, "%s", text, exc_info=bug)

    def passed(self, about: Hashable) -> bool:
        """Note that the subject works; return whether a failure of it was logged."""
        return self._said.pop(about, None) is not None
