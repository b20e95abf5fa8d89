"""Runs gpuleased with a wall clock that is ahead by the seconds in a file; all else is real."""

import os
import time
from pathlib import Path

from gpulease.daemon import main
from gpulease.daemon.clock import SystemClock


class SetClock(SystemClock):
    def _wall_ns(self) -> int:
        ahead_s = float(Path(os.environ["CLOCK_AHEAD"]).read_text())
        return time.time_ns() + round(ahead_s * 1e9)


if __name__ == "__main__":
    from gpulease.daemon import app

    app.SystemClock = SetClock  # type: ignore[misc]
    main.main()
