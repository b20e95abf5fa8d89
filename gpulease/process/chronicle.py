"""What has happened to one worker so far, kept in the record as it happens."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gpulease.process.record import Failure, RecordWriter, stamp


class Chronicle:
    """The shim's memory of its worker; each part is None until it has happened.

    Parts are held as they are written, so that peers are told the very same.
    """

    def __init__(self, record: RecordWriter) -> None:
        self.started: dict[str, Any] | None = None
        self.stopping: dict[str, Any] | None = None
        self.main_exited: dict[str, Any] | None = None
        self.exited: dict[str, Any] | None = None
        self._record = record
        self._unwritten: list[Mapping[str, Any]] = []

    def note_start(self, pid: int) -> dict[str, Any]:
        """Note that the worker has become its command."""
        self.started = {"pid": pid, "shim_pid": os.getpid(), "started_at": _now()}
        self._unwritten.append({"event": "started", **self.started})
        return self.started

    def note_stopping(self, reason: str) -> dict[str, Any]:
        """Note that the worker is being asked to go."""
        self.stopping = {"reason": reason, "at": _now()}
        self._unwritten.append({"event": "stopping", **self.stopping})
        return self.stopping

    def note_main_exit(self, code: int) -> dict[str, Any]:
        """Note that the main process has ended, with this exit code or, below 0, by a signal."""
        how = {"exit_code": code} if code >= 0 else {"signal": -code}
        self.main_exited = {**how, "at": _now()}
        self._unwritten.append({"event": "main_exited", **self.main_exited})
        return self.main_exited

    def note_end(self, max_rss: int) -> dict[str, Any]:
        """Note that the last process has gone."""
        main = dict(self.main_exited or {})
        at = main.pop("at", None)
        usual = "signaled" if "signal" in main else "exited"
        reason = self.stopping["reason"] if self.stopping else usual
        end = {"reason": reason, **main, "main_exited_at": at, "ended_at": _now()}
        return self._end({**end, "max_rss": max_rss})

    def note_failure(self, failure: Failure) -> dict[str, Any]:
        """Note that the worker never became its command."""
        failed = failure._asdict() | {"message": failure.message[:1000]}
        failed["hint"] = failure.hint and failure.hint[:500]
        end = {"reason": "launch_failed", "exit_code": failure.exit_code, "ended_at": _now()}
        return self._end({**end, "failed": failed})

    def write(self) -> None:
        """Put on disk what is not there yet."""
        lines, self._unwritten = self._unwritten, []
        try:
            if lines:
                self._record.append(*lines)
        except OSError:
            return  # the worker goes on; the peers are told all the same

    def _end(self, end: dict[str, Any]) -> dict[str, Any]:
        self.exited = end
        self._unwritten.append({"event": "exited", **end})
        return end


def _now() -> str:
    return stamp(datetime.now(UTC))
