"""The clock is set by a day, forward and back: no time that was given grows longer or shorter."""

import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for

from .asking import G, client, hold, submit, when, when_in

DAY_S = 24 * 3600


class ClockedDaemon(Daemon):
    """A daemon whose clock the test sets."""

    @property
    def ahead(self) -> Path:
        return self.folder / "ahead"

    def set_clock(self, ahead_s: float) -> None:
        new = self.folder / "ahead.new"
        new.write_text(str(ahead_s))
        new.replace(self.ahead)

    def command(self) -> list[str]:
        script = Path(__file__).parent / "clock_that_can_be_set.py"
        return [sys.executable, str(script), *super().command()[3:]]


@pytest.fixture
def clocked(tmp_path: Path, make_daemon: Callable[..., Daemon]) -> ClockedDaemon:
    folder = tmp_path / "clocked"
    folder.mkdir()
    daemon = ClockedDaemon(folder, settings={"grace": "1s"})
    daemon.environment = {"CLOCK_AHEAD": str(daemon.ahead)}
    daemon.set_clock(0)
    return daemon


def samples_after(daemon: Daemon, moment: datetime) -> int:
    border = int(moment.timestamp() * 1e6)
    with closing(sqlite3.connect(daemon.state / "gpulease.db", timeout=10)) as connection:
        query = "SELECT count(*) FROM gpu_memory WHERE resolution = 1 AND at >= ?"
        return int(connection.execute(query, (border,)).fetchone()[0])


@pytest.mark.parametrize("ahead_s", [DAY_S, -DAY_S])
def test_a_clock_that_is_set_ends_no_waiting_no_lease_and_no_job(
    ahead_s: int, clocked: ClockedDaemon
) -> None:
    daemon = clocked.start()
    try:
        set_by = timedelta(seconds=ahead_s)
        limited = submit(daemon, "sleep", "600", memory=8 * G, time_limit=3600.0)
        held = hold(daemon, None, memory=8 * G, time_limit=3600.0)
        when_in(daemon, limited, "active")
        before = when_in(daemon, held, "active")
        patient = submit(daemon, "true", memory=8 * G, wait=3600.0)
        impatient = submit(daemon, "true", memory=8 * G, wait=12.0)
        short = submit(daemon, "true", memory=8 * G)
        client(daemon).cancel(short)
        daemon.set_clock(ahead_s)
        shown = when(
            daemon, held, "its instants moved",
            # Job and events are read one after the other, and the clock may be followed in between.
            lambda it: (
                it.started_at != before.started_at
                and any(event.kind == "clock_set" for event in it.events)
            ),
        )  # fmt: skip
        assert before.started_at
        assert shown.started_at
        moved = datetime.fromisoformat(shown.started_at) - datetime.fromisoformat(before.started_at)
        assert abs(moved - set_by) < timedelta(seconds=60)
        assert shown.expires_at
        left = datetime.fromisoformat(shown.expires_at) - (datetime.now(UTC) + set_by)
        assert timedelta(minutes=50) < left <= timedelta(hours=1)
        # One that wanted to wait for some seconds gives up, and none of the others ends.
        assert when_in(daemon, impatient, "ended").outcome == "gave_up"
        assert client(daemon).job(patient).state == "queued"
        for job in (limited, held):
            assert client(daemon).job(job).state == "active"
        # More time is counted from where it stands.
        assert client(daemon).extend(held, 60.0).state == "active"
        wait_for(
            "sampling goes on",
            lambda: samples_after(daemon, datetime.now(UTC) + set_by - timedelta(hours=1)),
        )
        for page in (("list",), ("status",), ("show", str(held)), ("show", str(patient))):
            assert not re.search(r"\s-\d", daemon.run(*page).stdout)
        client(daemon).cancel(limited)
        assert when_in(daemon, patient, "ended").exit_status == 0
        assert "Traceback" not in daemon.log
    finally:
        with suppress(AssertionError):
            daemon.end_all()


def test_a_lease_held_for_a_time_ends_though_the_clock_was_set_back(
    clocked: ClockedDaemon,
) -> None:
    daemon = clocked.start()
    try:
        held = hold(daemon, None, time_limit=8.0)
        when_in(daemon, held, "active")
        daemon.set_clock(-DAY_S)
        assert when_in(daemon, held, "ended").outcome == "time_limit"
    finally:
        daemon.end_all()
