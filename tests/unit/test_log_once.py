"""What an admin can act on is one line in the log, however often it is met."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from gpulease.daemon.worker_threads import WriterThread
from gpulease.domain.enforcement import AppliedEnforcement
from gpulease.domain.gpu import JobId
from gpulease.errors import RecordDamaged, RecordUnwritable
from gpulease.host.sandbox import Sandbox
from gpulease.host.scopes import NoScope, Scope
from gpulease.service.log_once import LogOnce
from process_rig import launch_of

LOG = logging.getLogger("gpuleased.test")
FULL = RecordUnwritable("cannot write the record: database or disk is full", "make room")


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the journal would show."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.INFO]


def test_the_same_is_said_once_until_it_passes(caplog: pytest.LogCaptureFixture) -> None:
    complaints = LogOnce(LOG)
    for _ in range(3):
        complaints.say("disk", "full")
        complaints.say("disk", "broken")
        complaints.say("driver", "full")
    assert lines(caplog) == ["full", "broken", "full"]
    assert len(caplog.records) == 9, "the others are there for who looks for them"
    assert complaints.passed("disk")
    assert not complaints.passed("disk")
    complaints.say("disk", "full")
    complaints.say("driver", "full")
    assert lines(caplog)[3:] == ["full"]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def written(writer: WriterThread, call: Callable[[], object]) -> bool:
    async def write() -> bool:
        try:
            await writer(call)
        except RecordUnwritable as error:
            assert error.is_in_the_log
            return False
        return True

    return asyncio.run(write())


def fails(error: RecordUnwritable) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


def test_a_disk_that_is_full_for_a_night_is_said_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    writer = WriterThread("writer", nullcontext, clock)
    for _ in range(200):
        clock.now += 30
        assert not written(writer, fails(FULL))
        # A little still goes on a full disk.
        assert written(writer, lambda: None)
    assert lines(caplog) == [f"{FULL.message}; make room"]
    clock.now += 61
    assert written(writer, lambda: None)
    assert written(writer, lambda: None)
    assert len(lines(caplog)) == 2
    assert not written(writer, fails(FULL))
    damaged = RecordDamaged("cannot use the record: malformed", "gpuleased recover")
    assert not written(writer, fails(damaged))
    assert lines(caplog)[2:] == [
        f"{FULL.message}; make room",
        f"{damaged.message}; gpuleased recover",
    ]
    assert [each.levelname for each in caplog.records][-1] == "ERROR"
    writer.close()


def test_jobs_without_a_scope_are_one_line_until_one_has_a_scope(
    caplog: pytest.LogCaptureFixture, tmp_path: object
) -> None:
    broken = True

    async def make(pid: int, scope: Scope) -> None:
        if broken:
            raise NoScope("systemd did not answer within 10 seconds")

    async def note(job: JobId, enclosed: AppliedEnforcement) -> None:
        assert enclosed.missing or not broken

    enclosure = Sandbox(lambda: None, note, make)

    def launch(job: int, directory: object) -> None:
        asyncio.run(enclosure(1, launch_of(directory, "true", job=job)))  # type: ignore[arg-type]

    for job in range(100):
        launch(job, tmp_path)
    assert len(lines(caplog)) == 1
    assert "job 0" in lines(caplog)[0]
    broken = False
    launch(100, tmp_path)
    broken = True
    launch(101, tmp_path)
    assert len(lines(caplog)) == 2
