"""The daemon's log as the journal wants it: a level before each line, see sd-daemon(3)."""

import asyncio
import logging
import os
from collections.abc import Mapping

_PLAIN = "%(levelname)s %(name)s: %(message)s"
_IN_THE_JOURNAL = "%(name)s: %(message)s"
_ERROR = 3
_LEVELS = ((logging.CRITICAL, 2), (logging.ERROR, _ERROR), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def goes_to_journal(environment: Mapping[str, str], fd: int = 2) -> bool:
    """Tell whether what is written to `fd` goes to the journal.

    The variable alone says little: it is inherited by who has long been redirected.
    """
    there = os.fstat(fd)
    return environment.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"


def levelled(text: str, level: int = _ERROR) -> str:
    """Return `text` with a level of syslog(3) before each line; lines that are empty are left out.

    The journal makes an entry of each line, so a traceback keeps its level to the end.
    """
    return "\n".join(f"<{level}>{line}" for line in text.splitlines() if line.strip())


class JournalFormatter(logging.Formatter):
    """Writes the level as the journal reads it, so that `journalctl -p warning` finds it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of an entry."""
        level = next((syslog for at, syslog in _LEVELS if record.levelno >= at), _DEBUG)
        return levelled(super().format(record), level)


class WithoutFarewells(logging.Filter):
    """Drops what uvicorn says of the streams that end with the daemon: that is how they end."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to log it."""
        error = record.exc_info[1] if record.exc_info else None
        is_farewell = isinstance(error, asyncio.CancelledError)
        return not (is_farewell or str(record.msg).startswith("Cancel %s running task"))


def set_up(*, journal: bool) -> None:
    """Send the log to stderr, from INFO on."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JournalFormatter(_IN_THE_JOURNAL) if journal else logging.Formatter(_PLAIN)
    )
    logging.getLogger("uvicorn.error").addFilter(WithoutFarewells())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
