"""What users are notified of, what it says, and how many messages that makes."""

from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path

import pytest

from fakes import (
    ALICE,
    NOON,
    G,
    ended_job,
    granted_job,
    order,
)
from gpulease.cli.resolved_options import checked_settings
from gpulease.domain.gpu import JobId
from gpulease.domain.health import Drain, GpuAvailability
from gpulease.domain.job import Exit, Job, Outcome, UsageTotal, worker_started
from gpulease.domain.lease import LONGEST_TIME
from gpulease.domain.memory_estimate import size_next_time
from gpulease.domain.notifications import (
    Message,
    NotifyEvent,
    about_gpu,
    about_week,
    due_at,
    message_on,
    time_is_short,
)
from gpulease.errors import BadConfiguration, BadValue, with_hint
from gpulease.notifications.messages import last_lines, memory_use
from gpulease.notifications.sender import (
    BURST,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    QUIET_AFTER,
    MessageBudget,
    collected,
)
from gpulease.notifications.settings import NotifySettings
from gpulease.units import format_size
from gpulease.wire.notifications import EVENTS_OF_JOBS, notify_events

LATER = NOON + timedelta(hours=2)


def granted(*events: str, time_limit: timedelta | None = None) -> Job:
    asked = replace(order(8 * G, time_limit=time_limit), notify=events)
    return granted_job(asked.queued(JobId(7), NOON))


def running(*events: str, time_limit: timedelta | None = None) -> Job:
    job = worker_started(granted(*events, time_limit=time_limit), 1, 1, NOON)
    assert job is not None
    return job


def ended(before: Job, outcome: Outcome, code: int | None = None, detail: str | None = None) -> Job:
    return replace(ended_job(before, outcome, None, LATER, detail), exit=Exit(code))


@pytest.mark.parametrize(
    ("asked", "outcome", "code", "out_of_memory", "event"),
    [
        ("end", Outcome.EXITED, 0, False, "end"),
        ("fail", Outcome.EXITED, 0, False, None),
        ("end,fail", Outcome.EXITED, 1, False, "fail"),
        ("end", Outcome.EXITED, 1, False, "end"),
        ("end,fail,oom", Outcome.EXITED, 1, True, "oom"),
        ("fail", Outcome.EXITED, 1, True, "fail"),
        ("oom", Outcome.EXITED, 1, False, None),
        ("fail", Outcome.TIME_LIMIT, None, False, "fail"),
        ("fail", Outcome.CANCELLED, None, False, None),
        ("fail", Outcome.PREEMPTED, None, False, None),
        ("end", Outcome.CANCELLED, None, False, "end"),
        ("fail,digest", Outcome.EXITED, 0, False, "digest"),
        ("fail,digest", Outcome.EXITED, 1, False, "fail"),
        ("start,over-lease,time-left=60", Outcome.EXITED, 1, False, None),
    ],
)
def test_an_end_is_one_message_about_the_most_specific_event(
    asked: str, outcome: Outcome, code: int | None, out_of_memory: bool, event: str | None
) -> None:
    before = running(*asked.split(","))
    after = ended(before, outcome, code)
    after = replace(after, usage=replace(after.usage, out_of_memory=out_of_memory))
    message = message_on(before, after)
    assert (None if message is None else message.event) == event
    assert message_on(after, after) is None, "it ends once"


@pytest.mark.parametrize("outcome", Outcome)
def test_every_end_has_a_title(outcome: Outcome) -> None:
    message = message_on(running("end"), ended(running("end"), outcome, 3))
    assert message is not None
    assert message.title.startswith("job 7 (test) ")
    assert (message.uid, message.job) == (ALICE.uid, 7)


def test_a_start_is_a_message_unless_the_end_is_one_at_once() -> None:
    before = granted("start", "end")
    message = message_on(before, running("start", "end"))
    assert message is not None and message.event is NotifyEvent.START
    both = message_on(before, ended(running("start", "end"), Outcome.EXITED, 0))
    assert both is not None and both.event is NotifyEvent.END
    alone = message_on(granted("start"), ended(running("start"), Outcome.EXITED, 0))
    assert alone is not None and alone.event is NotifyEvent.START


def test_the_message_says_why_for_how_long_what_it_used_and_what_to_ask_for() -> None:
    job = ended(running("end"), Outcome.EXITED, 0)
    job = replace(job, leases=tuple(replace(each, used=2 * G) for each in job.leases))
    message = message_on(running("end"), job)
    assert message is not None
    assert message.body.splitlines() == [
        "It ran for 2h.",
        "gpulease show 7 shows more.",
    ]
    advised = size_next_time(job, G)
    assert advised is not None
    assert memory_use(job, G) == (
        f"It used 2G at most, of a lease of 8G; next time --mem {format_size(advised)}."
    )
    assert "--mem 4G" in (memory_use(job, 4 * G) or ""), "a smaller lease would be refused"
    assert memory_use(job, 8 * G) == "It used 2G at most, of a lease of 8G."
    why = with_hint("it held 9G", "use --mem 10G")
    message = message_on(running("fail"), ended(running("fail"), Outcome.OVER_LEASE, None, why))
    assert message is not None
    assert message.body.splitlines()[::2] == ["It held 9G.", "hint: use --mem 10G"]


def test_the_last_lines_are_those_that_a_terminal_shows() -> None:
    said = "a\n\x1b[31mred\x1b[0m\n\n 10%\r 90%\r100%\r\n\x1b]0;title\x07last\tline\x00\n"
    assert last_lines(said) == ["a", "red", "100%", "last    line "]
    assert last_lines("\n".join(map(str, range(100)))) == [str(each) for each in range(80, 100)]
    assert sum(map(len, last_lines("x" * 5000 + "\n" + "y" * 1500))) <= 2000
    assert last_lines("x" * 5000) == ["x" * 1999]
    assert last_lines("") == []


def test_the_time_is_short_from_the_span_on_unless_the_whole_limit_is() -> None:
    limit = timedelta(hours=1)
    job = running("time-left=600", time_limit=limit)
    assert not time_is_short(job, NOON + timedelta(minutes=49))
    assert time_is_short(job, NOON + timedelta(minutes=50))
    assert not time_is_short(running("time-left=3600", time_limit=limit), NOON)
    assert not time_is_short(running("end", time_limit=limit), LATER)
    assert not time_is_short(running("time-left=600"), LATER)


def test_the_message_of_a_week_has_what_was_leased_and_not_used() -> None:
    hour = 3600 * G
    total = UsageTotal("alice", 3, 1, 0.0, 400 * hour, 80 * hour, 20.4 * hour, 0, 0, 100 * hour, 0)
    message = about_week(7, total)
    assert message is not None
    assert (message.uid, message.event) == (7, "week")
    assert "left 20 of 100 GiB-hours" in message.title
    assert "3 jobs" in message.body and "of which 1 ran out of memory" in message.body
    assert about_week(7, replace(total, unused=0.4 * hour)) is None


def test_an_admin_hears_of_a_gpu_when_it_begins_or_ceases_to_be_drained() -> None:
    free, drained = GpuAvailability(), GpuAvailability(Drain("bob", "new fan", NOON))
    again = replace(drained, accepted_fault="x")
    found = [about_gpu(1, "0", *each) for each in ((free, drained), (drained, free))]
    assert [each and each.event for each in found] == ["gpu-drained", "gpu-resumed"]
    assert found[0] is not None and "new fan" in found[0].body
    assert about_gpu(1, "0", drained, again) is about_gpu(1, "0", free, free) is None


def test_a_burst_is_sent_one_by_one_and_then_collected_with_growing_pauses() -> None:
    budget, now = MessageBudget(), timedelta(0)
    assert [budget.takes_one(now) for _ in range(BURST + 1)] == [True] * BURST + [False]
    assert budget.wait(now) == timedelta(0)
    pauses = []
    for _ in range(8):
        budget.note_collected(now)
        pauses.append(budget.wait(now))
        now += pauses[-1]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    now += 2 * QUIET_AFTER
    assert budget.takes_one(now)
    budget.note_collected(now)
    assert budget.wait(now) == FIRST_PAUSE


def test_a_collected_message_lists_the_first_and_counts_the_others() -> None:
    message = collected(1, [f"job {n} failed" for n in range(20)], 10_000)
    assert message.title == "10000 notifications of jobs"
    assert message.body.splitlines()[-1].startswith("and 9980 more")


@pytest.mark.parametrize(
    ("quiet", "at", "until"),
    [
        ("22:00-07:00", "21:59", None),
        ("22:00-07:00", "22:00", "2 07:00"),
        ("22:00-07:00", "03:00", "1 07:00"),
        ("22:00-07:00", "07:00", None),
        ("12:00-13:30", "12:10", "1 13:30"),
        ("12:00-13:30", "14:00", None),
    ],
)
def test_quiet_hours_may_span_midnight(quiet: str, at: str, until: str | None) -> None:
    begin, end = (time.fromisoformat(each) for each in quiet.split("-"))
    now = datetime.combine(date(2026, 3, 1), time.fromisoformat(at)).astimezone()
    found = NotifySettings(quiet=(begin, end)).quiet_until(now)
    assert (None if found is None else f"{found:%-d %H:%M}") == until


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(("day", "hour"), [((3, 28), 6), ((10, 24), 7)])
def test_a_morning_is_at_its_time_of_day_over_a_change_of_the_clocks(
    day: tuple[int, int], hour: int
) -> None:
    evening = datetime(2026, *day, 21, 30, tzinfo=UTC)
    morning = datetime(2026, day[0], day[1] + 1, hour, tzinfo=UTC)
    assert due_at(Message(1, NotifyEvent.DIGEST, "", ""), evening) == morning
    quiet = NotifySettings(quiet=(time(22), time(8)))
    assert quiet.quiet_until(evening.astimezone()) == morning


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("at", "until"),
    [
        ((10, 25, 0, 15), (10, 25, 0, 30)),
        ((10, 25, 1, 15), (10, 25, 1, 30)),
        ((10, 24, 23, 0), (10, 25, 0, 30)),
        ((3, 29, 0, 15), (3, 29, 1, 30)),
    ],
)
def test_quiet_hours_end_on_the_night_of_the_change_whichever_hour_it_is(
    at: tuple[int, ...], until: tuple[int, ...]
) -> None:
    # On 25 October 2:15 comes at 0:15 and at 1:15 UTC, and on 29 March 2:30 never comes.
    quiet = NotifySettings(quiet=(time(22), time(2, 30)))
    now = datetime(2026, *at, tzinfo=UTC).astimezone()
    assert quiet.quiet_until(now) == datetime(2026, *until, tzinfo=UTC)


def test_events_are_checked_and_each_counts_once() -> None:
    assert notify_events(["fail", "end", "fail"]) == ("end", "fail")
    assert notify_events([]) == ()
    assert notify_events(["all"]) == (*EVENTS_OF_JOBS[:-2], "time-left=600")
    assert notify_events(["time-left=30", "fail", "start"]) == ("start", "fail", "time-left=30")
    assert notify_events(["digest"]) == ("digest",)
    assert "time-left=30" in notify_events(["all", "time-left=30"])
    for wrong in ("ends", "end=3", "time-left=x", "time-left=0", "gpu-drained", ""):
        with pytest.raises(BadValue):
            notify_events([wrong])
    longest = int(LONGEST_TIME.total_seconds())
    assert notify_events([f"time-left={longest}"])
    with pytest.raises(BadValue):
        notify_events([f"time-left={longest + 1}"])
    assert set(EVENTS_OF_JOBS) <= set(NotifyEvent)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ('events = "fail,time-left=2h"', None),
        ('events = ["none"]', None),
        ("mail = 'me@example.org'", "no longer sends mail"),
        ('events = ["fale"]', "no event named 'fale'"),
        ('events = ["time-left=soon"]', "cannot read the time 'soon'"),
        ('time_left = "0.3s"', "cannot read the time"),
        ("details = false", None),
        ("details = 1", "details is true or false"),
        ('quiet = "22:00-07:00"', None),
        ('quiet = "22-7"', "quiet is a part of the day"),
        ('quiet = "07:00-07:00"', "begins and ends at the same time"),
    ],
)
def test_a_file_that_submissions_cannot_use_is_no_good_for_notify_either(
    tmp_path: Path, lines: str, wrong: str | None
) -> None:
    (tmp_path / "gpulease").mkdir()
    (tmp_path / "gpulease" / "config.toml").write_text(f"[notify]\n{lines}\n")
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    if wrong is None:
        checked_settings(variables)
    else:
        with pytest.raises(BadConfiguration, match=wrong):
            checked_settings(variables)
