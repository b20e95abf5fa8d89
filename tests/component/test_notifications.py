"""Attempts to send notifications: a real database, real shims, receivers that fail or hang."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

import pytest
from receiver import Receiver, receiving
from sqlalchemy import select, update
from sqlalchemy.event import listen

from fakes import (
    ALICE,
    NOON,
    FakeClock,
    ended_job,
    order,
    reading,
    running_job,
)
from gpulease.daemon.clock import SystemClock
from gpulease.domain.gpu import JobId
from gpulease.domain.job import (
    Job,
    Owner,
)
from gpulease.domain.notifications import Message, Notification, NotifyEvent
from gpulease.domain.queue_options import Indices
from gpulease.errors import TooMany
from gpulease.host.launcher import Launcher
from gpulease.notifications.messages import TimeLeftWatch
from gpulease.notifications.outbox import KEPT_FOR, Outbox
from gpulease.notifications.receivers import NotSent, kind_of, receivers_of, text_of
from gpulease.notifications.sender import BURST, Delivery, Program, Sending
from gpulease.notifications.settings import NotifySettings
from gpulease.service import jobs, scheduler, submission
from gpulease.service.observation import Observation
from gpulease.service.ports import Policy, WorkerStarted
from gpulease.service.queue_state import QueueState
from gpulease.service.transactions import change_jobs
from gpulease.store.store import SqlStore
from gpulease.store.tables import NotificationRow
from gpulease.wire.notifications import NotificationOrder

T = TypeVar("T")
SELF = os.geteuid()
ZONE = "XXX-11"
"""Eleven hours east of Greenwich, as POSIX writes it."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def in_writer(call: Callable[[], T]) -> Awaitable[T]:
    return asyncio.to_thread(call)


def configure(home: Path, *lines: str) -> None:
    folder = home / "gpulease"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("\n".join(["[notify]", *lines]))


def program_of(launcher: Launcher, home: Path, within_s: float = 25) -> Program:
    environment = {"XDG_CONFIG_HOME": str(home), "TZ": ZONE}
    return Program(
        launcher, home / "notifications", environment, as_other_users=False,
        within=timedelta(seconds=within_s),
    )  # fmt: skip


@asynccontextmanager
async def delivering(
    store: SqlStore, home: Path, *lines: str, pauses: int = 2, within_s: float = 25
) -> AsyncIterator[Sending]:
    configure(home, *lines)
    launcher = Launcher()
    sender = program_of(launcher, home, within_s)
    delivery = Sending(
        Outbox(store), sender, SystemClock(), in_writer, [timedelta(seconds=0.05)] * pauses
    )
    store.announced = delivery.wake
    running = asyncio.create_task(delivery.run())
    try:
        yield delivery
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await launcher.close()


def message(title: str, job: JobId | None = None) -> Message:
    return Message(SELF, NotifyEvent.END, title, "body", job)


def rows(store: SqlStore) -> list[tuple[int, bool, str | None]]:
    """Return the attempts, whether there will be more, and the error of each notification."""
    with store.engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT attempts, next_at IS NOT NULL, error FROM notifications ORDER BY id"
        )
        return [(attempts, bool(pending), error) for attempts, pending, error in found]


async def is_soon(is_so: Callable[[], bool]) -> None:
    """Wait: a result is on record before it is counted."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def settled(store: SqlStore) -> list[tuple[int, bool, str | None]]:
    until = time.monotonic() + 60
    while any(pending for _, pending, _ in rows(store)) or not rows(store):
        assert time.monotonic() < until, rows(store)
        await asyncio.sleep(0.02)
    return rows(store)


def add(store: SqlStore, *messages: Message) -> None:
    with change_jobs(store) as tx:
        tx.add_messages([(each, NOON) for each in messages])


def test_only_the_receivers_that_failed_get_it_again(
    store: SqlStore, tmp_path: Path, receiver: Receiver
) -> None:
    receiver.refuses = 1
    command = f'command = ["sh", "-c", "echo sent >> {tmp_path}/sent"]'

    async def scenario() -> None:
        async with delivering(store, tmp_path, f'urls = ["{receiver.url}"]', command) as delivery:
            add(store, message("job 1 ended"))
            assert Outbox(store).waiting() == 1
            assert await settled(store) == [(2, False, None)]
            await is_soon(lambda: delivery.sent == 1)
            assert (delivery.given_up, Outbox(store).waiting()) == (0, 0)
            while list((tmp_path / "notifications").iterdir()):
                await asyncio.sleep(0.02)

    asyncio.run(scenario())
    assert receiver.titles == ["job 1 ended"]
    assert (tmp_path / "sent").read_text() == "sent\n"


def test_a_sender_with_nothing_to_send_asks_the_database_nothing(
    store: SqlStore, tmp_path: Path, receiver: Receiver
) -> None:
    async def scenario() -> None:
        async with delivering(store, tmp_path, f'urls = ["{receiver.url}"]') as delivery:
            add(store, message("job 1 ended"))
            await settled(store)
            await is_soon(lambda: delivery.sent == 1)
            await asyncio.sleep(1)  # the last look
            asked: list[str] = []
            listen(store.engine, "before_cursor_execute", lambda *called: asked.append(called[2]))
            await asyncio.sleep(1)
            assert asked == []

    asyncio.run(scenario())


def test_a_message_is_given_up_after_the_last_attempt_and_the_job_says_why(
    store: SqlStore, tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.refuses = 100
    mine = replace(order(), owner=Owner(SELF, os.getegid(), "me"))
    with change_jobs(store) as tx:
        job = tx.add(mine, NOON)

    async def scenario() -> None:
        async with delivering(store, tmp_path, f'urls = ["{receiver.url}"]') as delivery:
            add(store, message("job 1 ended", job.id), message("job 1 ended", job.id))
            why = "url 1 (json): Apprise could not send it"
            assert await settled(store) == [(3, False, why)] * 2
            await is_soon(lambda: delivery.given_up == 2)
            assert delivery.sent == 0

    asyncio.run(scenario())
    assert receiver.refuses == 94
    failures = [each.detail for each in store.events(job.id) if each.kind == "notify_failed"]
    assert failures == ["cannot notify of end: url 1 (json): Apprise could not send it"] * 2
    assert len([each for each in caplog.records if "cannot notify" in each.message]) == 1


def test_an_attempt_that_an_earlier_daemon_began_is_followed_and_not_repeated(
    store: SqlStore, tmp_path: Path, receiver: Receiver
) -> None:
    receiver.open.clear()
    add(store, message("job 1 ended"))

    async def begin() -> None:
        async with delivering(store, tmp_path, f'urls = ["{receiver.url}"]'):
            until = time.monotonic() + 60
            while not receiver.got:
                assert time.monotonic() < until
                await asyncio.sleep(0.02)

    async def go_on() -> None:
        async with delivering(store, tmp_path, f'urls = ["{receiver.url}"]'):
            receiver.open.set()
            assert await settled(store) == [(1, False, None)]

    asyncio.run(begin())
    assert rows(store) == [(0, True, None)]
    asyncio.run(go_on())
    assert receiver.titles == ["job 1 ended"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Apprise's imports
def test_a_service_for_html_keeps_the_lines_and_knows_a_failure(
    tmp_path: Path, receiver: Receiver
) -> None:
    settings = NotifySettings(urls=(f"{receiver.url}?format=html", receiver.url))
    asked = NotificationOrder("end", "title", "one\ntwo", 10, details="three & <four>", failed=True)
    for each in receivers_of(settings):
        each.send(asked, 10)
    html, text = (body for _, body in receiver.got)
    assert "one<br" in html and "&lt;four&gt;" in html
    assert text == "one\ntwo\nthree & <four>"
    assert receiver.kinds == ["failure"] * 2
    for event, kind in (("oom", "failure"), ("time-left", "warning"), ("start", "info")):
        assert kind_of(NotificationOrder(event, "", "", 1)) == kind
    assert kind_of(replace(asked, failed=False)) == "success"


def array_of(store: SqlStore, count: int, *events: str) -> Sequence[Job]:
    """Store an array, of which all elements run."""
    mine = replace(order(1), notify=events, owner=Owner(SELF, os.getegid(), "me"))
    with change_jobs(store) as tx:
        tx.add_gpus([reading()], NOON)
        jobs = tx.add_array(mine, Indices(tuple(range(count))), NOON)
        for job in jobs:
            tx.save(running_job(job), None)
    return [job for job in store.live() if job.queue.array is not None]


def end(store: SqlStore, job: Job, code: int) -> None:
    with change_jobs(store) as tx:
        tx.save(ended_job(job, code=code), None)


def test_the_elements_of_an_array_are_one_message_for_each_event_and_a_summary(
    store: SqlStore,
) -> None:
    jobs = array_of(store, 40, "start", "end", "fail")
    other = replace(message("another job"), event=NotifyEvent.FAIL)
    add(store, other)
    for job in jobs[:-1]:
        end(store, job, 0 if job.queue.array and job.queue.array.index < 9 else 3)
    titles, _ = Outbox(store).new_of(SELF, SystemClock().now(), 99, digest=False)
    assert titles == [
        "job 1_0 (test) has started", "another job", "job 1_9 (test) failed: exit status 3"
    ]  # fmt: skip
    end(store, jobs[-1], 0)
    titles, _ = Outbox(store).new_of(SELF, SystemClock().now(), 99, digest=False)
    assert titles[3:] == ["array 1 (test) has ended: 10 of 40 elements succeeded"]
    with store.engine.connect() as connection:
        bodies = connection.exec_driver_sql("SELECT body FROM notifications ORDER BY id").scalars()
        *_, failed, summary = bodies.all()
    assert "1_9, 1_10" in summary and "and 10 more" in summary
    assert "Further elements of array 1 send no such message" in failed


def test_a_user_who_does_not_exist_is_an_error_on_record(store: SqlStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with delivering(store, tmp_path):
            add(store, replace(message("job 1 ended"), uid=4_000_111))
            ((attempts, _, error),) = await settled(store)
            assert attempts == 1 and error is not None and "no user has the id" in error

    asyncio.run(scenario())


class Refusing(Program):
    """A sender that starts nothing at first when it gets a collected message."""

    def __init__(self) -> None:
        super().__init__(Launcher(), Path("/nonexistent"), {}, as_other_users=False)
        self.sent: list[Message] = []
        self.refuses = 3

    async def send(self, sent: Notification) -> Delivery | None:
        if sent.message.event is NotifyEvent.COLLECTED and self.refuses:
            self.refuses -= 1
            return None
        self.sent.append(sent.message)
        return Delivery()


def test_what_is_stored_while_messages_are_collected_is_not_lost(store: SqlStore) -> None:
    sender, stored = Refusing(), list[str]()

    def and_store_one(call: Callable[[], T]) -> T:
        result = call()
        if len(sender.sent) <= BURST:
            stored.append(f"job {len(stored)} ended")
            add(store, message(stored[-1]))
        return result

    def busy_writer(call: Callable[[], T]) -> Awaitable[T]:
        return asyncio.to_thread(and_store_one, call)

    async def scenario() -> None:
        delivery = Sending(Outbox(store), sender, SystemClock(), busy_writer, try_again_s=0.01)
        running = asyncio.create_task(delivery.run())
        until = time.monotonic() + 60
        while len(sender.sent) <= BURST:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    *single, last = sender.sent
    assert len(single) == BURST and sender.refuses == 0
    number = int(last.title.split()[0])
    _, waiting = Outbox(store).new_of(SELF, SystemClock().now(), 0, digest=False)
    assert BURST + number + waiting == len(stored)


def test_a_job_that_is_extended_is_announced_again_and_a_restart_announces_nothing(
    store: SqlStore,
) -> None:
    clock = FakeClock()
    with change_jobs(store) as tx:
        tx.add_gpus([reading()], NOON)
    seen = Observation((reading(),), {}, NOON)
    asked = replace(order(time_limit=timedelta(hours=1)), notify=("time-left=600",))
    job = submission.submit(store, asked, seen, Policy(), clock, QueueState(store))
    scheduler.reconcile(store, seen, Policy(), clock)
    jobs.note_started(store, job.id, WorkerStarted(10, 9, NOON))

    later = SystemClock().now()

    def titles(watch: TimeLeftWatch, minutes: int) -> list[str]:
        clock.at = NOON + timedelta(minutes=minutes)
        asyncio.run(watch.observe(seen))
        return [
            each.partition(") ")[2]
            for each in Outbox(store).new_of(ALICE.uid, later, 9, digest=False)[0]
        ]

    watch = TimeLeftWatch(store, clock, in_writer)
    assert titles(watch, 49) == []
    assert len(titles(watch, 51)) == 1
    jobs.extend(store, job.id, timedelta(minutes=30), "me", clock)
    assert len(titles(watch, 52)) == 1
    assert len(titles(watch, 81)) == 2
    assert len(titles(TimeLeftWatch(store, clock, in_writer), 82)) == 2
    with store.write_connection() as connection:
        connection.exec_driver_sql("UPDATE notifications SET next_at = NULL")
    Outbox(store).delete_old(clock.at + 2 * KEPT_FOR)
    assert len(rows(store)) == 2, "the job still runs"


def test_a_report_that_is_lost_is_no_success(store: SqlStore, tmp_path: Path) -> None:
    remove = (
        f'command = ["sh", "-c", "echo sent >> {tmp_path}/sent; rm {tmp_path}/notif*/*/stdout"]'
    )

    async def scenario() -> None:
        async with delivering(store, tmp_path, remove, pauses=1):
            add(store, message("job 1 ended"))
            ((attempts, _, error),) = await settled(store)
            assert attempts == 2 and error is not None and "did not report" in error

    asyncio.run(scenario())
    assert (tmp_path / "sent").read_text() == "sent\n" * 2


def test_a_user_tests_once_at_a_time(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    configure(tmp_path, f'command = ["sh", "-c", "until test -e {gate}; do sleep 0.05; done"]')

    async def scenario() -> None:
        launcher = Launcher()
        sender = program_of(launcher, tmp_path)
        first = asyncio.create_task(sender.test(SELF))
        await asyncio.sleep(0)
        with pytest.raises(TooMany):
            await sender.test(SELF)
        gate.touch()
        assert [each.error for each in (await first).receivers] == [None]
        assert [each.error for each in (await sender.test(SELF)).receivers] == [None]
        await launcher.close()

    asyncio.run(scenario())


def test_old_notifications_are_deleted_and_pending_ones_stay(store: SqlStore) -> None:
    add(store, message("one"), message("two"))
    records = Outbox(store)
    first = records.next_of(SELF, datetime.now(UTC))
    assert first is not None
    records.settle(first, 1, None, None, None)
    records.delete_old(NOON + KEPT_FOR)
    assert len(rows(store)) == 2
    records.delete_old(NOON + KEPT_FOR + timedelta(seconds=1))
    assert rows(store) == [(0, True, None)]


def test_a_receiver_that_hangs_is_ended_and_others_get_the_message_meanwhile(
    store: SqlStore, tmp_path: Path, receiver: Receiver
) -> None:
    pid = tmp_path / "pid"
    command = f'command = ["sh", "-c", "echo $$ > {pid}; trap : TERM; sleep 600; sleep 600"]'

    async def scenario() -> None:
        urls = f'urls = ["{receiver.url}"]'
        async with delivering(store, tmp_path, urls, command, pauses=0, within_s=3):
            add(store, message("job 1 ended"))
            assert await settled(store) == [(1, False, "command: no end within 3s")]

    asyncio.run(scenario())
    assert receiver.titles == ["job 1 ended"]
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Apprise's imports
def test_each_receiver_says_what_is_wrong_with_it(receiver: Receiver) -> None:
    receiver.refuses = 1
    asked = NotificationOrder("test", "title", "body", 10, verbose=True)
    nowhere = "/nonexistent/program"
    settings = NotifySettings(command=(nowhere,), urls=(receiver.url, "json://127.0.0.1:9/"))
    receivers = receivers_of(settings)
    with ThreadPoolExecutor(len(receivers)) as pool:
        sent = [pool.submit(each.send, asked, 10) for each in receivers]
    command, refused, unreachable = (each.exception() for each in sent)
    assert isinstance(command, NotSent)
    assert nowhere not in str(command) and nowhere in (command.hint or "")
    assert isinstance(refused, NotSent) and isinstance(unreachable, NotSent)
    assert "503" in refused.output and "Connection" not in refused.output
    assert "Connection" in unreachable.output and "503" not in unreachable.output
    assert refused.hint is None


def test_a_digest_is_one_message_on_the_next_morning(
    store: SqlStore, tmp_path: Path, receiver: Receiver
) -> None:
    for job, code in zip(array_of(store, 3, "digest"), (0, 1, 0), strict=True):
        end(store, job, code)
    add(store, replace(message("job 9 ended"), event=NotifyEvent.DIGEST))
    with store.engine.connect() as connection:
        due = connection.execute(select(NotificationRow.next_at)).scalars().all()
    assert len(due) == 2, "of the array there is one line"
    assert {at.astimezone().hour for at in due if at is not None} == {8}
    outbox, early, late = Outbox(store), NOON + timedelta(minutes=1), NOON + timedelta(days=2)
    assert outbox.new_of(SELF, early, 99, digest=True) == ([], 0)
    assert outbox.new_of(SELF, late, 99, digest=True)[1] == 2
    assert outbox.new_of(SELF, late, 99, digest=False)[1] == 0

    async def scenario() -> None:
        # That morning has long been.
        async with delivering(store, tmp_path, f'urls = ["{receiver.url}"]'):
            await is_soon(lambda: bool(receiver.got))

    asyncio.run(scenario())
    assert receiver.titles == ["2 jobs have ended since the last digest"]
    assert receiver.got[0][1].splitlines() == [
        "array 1 (test) has ended: 2 of 3 elements succeeded, not 1_1", "job 9 ended"
    ]  # fmt: skip


def test_in_quiet_hours_a_message_waits_for_their_end(
    store: SqlStore, tmp_path: Path, receiver: Receiver
) -> None:
    # The daemon's zone, and not that of the machine.
    now = datetime.now(timezone(timedelta(hours=11)))
    begin, stop = now - timedelta(hours=1), now + timedelta(hours=2)
    to_receiver = f'urls = ["{receiver.url}"]'

    async def scenario() -> None:
        quiet = f'quiet = "{begin:%H:%M}-{stop:%H:%M}"'
        async with delivering(store, tmp_path, to_receiver, quiet, pauses=0):
            add(store, message("job 1 ended"))
            await is_soon(lambda: rows(store) == [(0, True, "quiet hours")])
        with store.engine.begin() as connection:
            at = connection.execute(select(NotificationRow.next_at)).scalar_one()
            assert at == stop.replace(second=0, microsecond=0)
            connection.execute(update(NotificationRow).values(next_at=now))
        assert receiver.got == []
        # It was no attempt, so the first one is the only one here.
        async with delivering(store, tmp_path, to_receiver, pauses=0):
            await is_soon(lambda: bool(receiver.got))

    asyncio.run(scenario())


def test_the_page_of_the_job_is_the_last_line() -> None:
    order = NotificationOrder("end", "title", "body", 10, details="output", link="https://a/jobs/7")
    assert text_of(order).splitlines() == ["body", "output", "https://a/jobs/7"]
