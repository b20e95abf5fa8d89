"""SIGHUP: the settings are read anew, and what can change under a running daemon changes."""

import logging
from collections.abc import Callable

from gpulease.config import Settings, renew
from gpulease.daemon.assembly import Parts
from gpulease.daemon.names import warn_of_unknown_names
from gpulease.daemon.notify import Notifier
from gpulease.daemon.standing import standing
from gpulease.errors import GpuleaseError
from gpulease.timers import Timer

_log = logging.getLogger("gpuleased")


class Reload:
    """Takes over new settings each time that it is called; with bad ones nothing changes."""

    def __init__(
        self, parts: Parts, sampling: Timer, notifier: Notifier, read: Callable[[], Settings]
    ) -> None:
        self._parts = parts
        self._sampling = sampling
        self._notifier = notifier
        self._read = read

    def __call__(self) -> None:
        """Read the settings and take them over, and say in the log what came of it."""
        self._notifier.reloading()
        try:
            fresh = self._read()
        except GpuleaseError as error:
            _log.error("the settings stay as they were: %s", error.text())
        else:
            self._take_over(fresh)
        self._notifier.ready(standing(self._parts))

    def _take_over(self, fresh: Settings) -> None:
        before = self._parts.settings
        settings, taken, left = renew(before, fresh)
        self._parts.adopt(settings)
        if settings.sample_every != before.sample_every:
            self._sampling.change(settings.sample_every)
        # What was refused for want of memory may fit now.
        self._parts.keeper.wake()
        _log.info("settings read again; changed: %s", ", ".join(taken) or "nothing")
        warn_of_unknown_names(settings)
        if left:
            _log.warning("%s: a restart is needed for this to change", ", ".join(left))
