"""The live view: one task asks for the status while a browser listens, and all get its result."""

from gpulease.web.daemon_reader import DaemonReader


class LiveStatus:
    """Draws the status once for all listeners."""

    def __init__(self, daemon: DaemonReader) -> None:
        self._daemon = daemon

    def close(self) -> None:
        """End all streams."""
