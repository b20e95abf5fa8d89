"""The waiting line, exit codes, and words as they are shown."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from daemon_stand_in import views
from goldens import mentions, sentence
from gpulease.cli import cancel_jobs as cancel
from gpulease.cli.array_command import array_doubts
from gpulease.cli.change_jobs import result_of_keep
from gpulease.cli.exit_codes import JobEnd, status_of_ending, status_of_job
from gpulease.cli.job_watch import JobWatch, StderrStatus, WaitingLine
from gpulease.cli.messages import (
    last_words,
    preset_devices,
    started_line,
    waiting_line,
    waiting_text,
)
from gpulease.cli.signals import Signals
from gpulease.cli.tables import line_breaks
from gpulease.drawing.words import (
    clean,
    clock,
    display_width,
    probable_start,
    shorten,
    starts_in,
)
from gpulease.wire.jobs import DeviceView, JobView
from gpulease.wire.text import ordinal

NOW = views.NOW
GAP = "needs 6G, and at most 2G is free on a GPU now"


class Paper:
    """What was written, and an event at each writing."""

    def __init__(self) -> None:
        self.text = ""
        self.written = threading.Event()

    def write(self, text: str) -> None:
        self.text += text
        self.written.set()


def impatient(width: int | None = None) -> tuple[Paper, WaitingLine]:
    paper = Paper()
    line = WaitingLine(paper.write, None if width is None else lambda: width, delay=0.0)
    line.show("first", NOW)
    assert paper.written.wait(10)
    return paper, line


def test_the_line_says_where_why_and_for_whom() -> None:
    job = views.job(17, position=2, waits_for=[12], reason=GAP)
    blocker = views.running(12, user="alice", expires_at="2026-03-02T14:30:00Z")
    sentence("waiting", waiting_text(job, blocker, NOW))
    job = replace(views.waiting(), reason=GAP)
    sentence("waiting-predicted", waiting_text(job, blocker, NOW))


def test_jobs_in_the_way_are_counted_and_not_listed() -> None:
    job = views.job(waits_for=[1, 2, 3], reason=GAP)
    sentence("waiting-counted", waiting_text(job, None, NOW))


def start(at: str, **probably: Any) -> JobView:
    job = views.job(expected_start_at=f"2026-03-{at}:00Z")
    return replace(job, expected_start=views.probably(after=12, **probably))


def day(at: str) -> str:
    return f"2026-03-{at}:00Z"


STARTS = {
    "starts-in-hours": start("02T17:05", from_at=day("02T15:00"), until_at=day("02T23:10")),
    "starts-in-days": start("04T14:05", from_at=day("03T06:00"), until_at=day("08T15:00")),
    "starts-from-hours-to-days": start("03T02:05", from_at=day("02T18:00"),
                                       until_at=day("04T03:00")),
    "starts-within-the-hour": start("02T14:20", from_at=day("02T14:00"), until_at=day("02T15:10")),
    "starts-within-hours": start("02T14:20", from_at=day("02T14:00"), until_at=day("02T17:10")),
    "starts-at-a-known-time": replace(
        job := start("02T22:00", from_at=day("02T22:00"), until_at=day("02T22:00")),
        expected_start=replace(job.expected_start, after=None),
    ),
    "starts-soon": start("02T14:06"),
    "starts-overdue": start("02T14:06", after_is_late=True),
    "starts-later-than-predicted": start("02T14:06", after_is_late=True, is_late=True),
    "starts-kept-for-it": start("02T17:05", kept_free_from_at=day("02T18:40"), after_label="9_7"),
    "starts-kept-now": start("02T17:05", kept_free_from_at=day("02T14:05")),
    "starts-of-an-older-daemon": views.job(expected_start_at=day("03T09:00")),
    "starts-unknown-but-kept": views.job(expected_start=views.probably(
        from_at=None, until_at=None, kept_free_from_at=day("03T09:00")
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", STARTS)
def test_a_start_is_a_range_in_the_grain_that_it_has(name: str) -> None:
    job = STARTS[name]
    sentence(name, f"{starts_in(job, NOW)}\n{probable_start(job, NOW)}")


def test_a_terminal_has_its_line_rewritten_and_left_clean() -> None:
    paper, line = impatient(width=8)
    line.show("second one", NOW)
    line.clear()
    assert paper.text == "\r\x1b[2Kfirst" + "\r\x1b[2Ksecond…" + "\r\x1b[2K"


@pytest.mark.parametrize(("width", "place", "why"), [(110, True, True), (98, False, True),
                                                     (60, False, False)])  # fmt: skip
def test_a_narrow_terminal_keeps_the_start_and_the_reason(
    width: int, place: bool, why: bool
) -> None:
    job = replace(views.waiting(), position=2, reason=GAP)
    paper, line = impatient(width)
    line.show(waiting_line(job, NOW, "Ctrl-C cancels"), NOW)
    shown = paper.text.rpartition("\x1b[2K")[2]
    assert len(shown) < width
    assert starts_in(job, NOW) in shown
    assert ("2nd" in shown, GAP in shown, "needs" in shown) == (place, why, True)


def test_the_line_on_a_terminal_says_the_start_first_and_the_keys_last() -> None:
    waiting, unknown = replace(views.waiting(), reason=GAP), views.job(17, reason=GAP)
    sentence("waiting-line", waiting_line(waiting, NOW, "Ctrl-C cancels"))
    sentence("waiting-line-unknown", waiting_line(unknown, NOW, "Ctrl-C cancels"))


def test_a_job_that_starts_is_said_to_be_somewhere() -> None:
    devices = [DeviceView(views.FIRST, [], "RTX", None, index="0")]
    one = replace(views.running(3), devices=devices)
    sentence("started-line", started_line(one))
    simulated = [replace(each, simulated=True) for each in devices]
    sentence("started-line-again", started_line(replace(one, devices=simulated), "17"))


def test_a_log_gets_a_line_for_news_and_at_most_every_thirty_seconds() -> None:
    paper, line = impatient()
    line.show("second", NOW + timedelta(seconds=29))
    line.show("second", NOW + timedelta(seconds=31))
    line.show("second", NOW + timedelta(seconds=90))
    line.clear()
    assert paper.text == "first\nsecond\n"


def test_a_job_that_starts_at_once_is_not_talked_about() -> None:
    paper = Paper()
    line = WaitingLine(paper.write, lambda: 80, delay=3600.0)
    line.show("first", NOW)
    line.clear()
    assert paper.text == ""


class Watched:
    """A client whose job is granted, and starts once `before_start` has been called."""

    def __init__(self, before_start: Callable[[], None]) -> None:
        self._before_start = before_start

    def watch(self, number: int) -> Iterator[JobView]:
        yield views.job(number, state="granted", position=None, reason=None)
        self._before_start()
        yield views.running(number)


def test_a_job_that_is_granted_is_not_said_to_wait() -> None:
    paper = Paper()
    line = WaitingLine(paper.write, None, delay=3600.0)
    due: list[threading.Timer | None] = []
    client = Watched(lambda: due.append(line._timer))
    with Signals() as signals:
        stderr = StderrStatus(paper.write, line, lambda: NOW)
        JobWatch(client, signals, stderr).wait_for_start(views.job(17))
    assert due == [None]
    assert paper.text == ""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (JobEnd(0, None, "exited"), 0),
        (JobEnd(None, 9, "signaled"), 137),
        (JobEnd(None, 15, "time_limit"), 124),
        (JobEnd(0, None, "time_limit"), 124),
        (JobEnd(3, None, "cancelled"), 3),
        (JobEnd(None, None, "None"), 125),
    ],
)
def test_run_exits_as_the_shim_says(ending: JobEnd, status: int) -> None:
    assert status_of_ending(ending) == status


@pytest.mark.parametrize(
    ("grace", "when"),
    [(60.0, "with-grace"), (0.0, "at-once"), (None, "unknown-grace")],
    ids=["some", "none", "a daemon that does not tell"],
)
def test_who_cancels_is_told_how_long_the_job_has(grace: float | None, when: str) -> None:
    job = views.running(12, state="releasing", grace=grace)
    sentence(f"cancel-{when}", cancel.result(job))


@pytest.mark.parametrize(
    ("outcome", "exit_status", "status", "said"),
    [
        ("exited", 3, 3, None),
        ("gave_up", None, 75, "17"),
        ("time_limit", None, 124, "17"),
        ("launch_failed", 127, 127, "17"),
        ("lost", None, 125, "17"),
    ],
)
def test_run_exits_as_the_daemon_says(
    outcome: str, exit_status: int | None, status: int, said: str | None
) -> None:
    job = replace(views.over(17, exit_status), outcome=outcome)  # type: ignore[arg-type]
    assert status_of_job(job) == status
    words = last_words(job)
    assert words is None if said is None else said in (words or "")


def test_who_keeps_a_lease_is_told_from_what() -> None:
    job, hour = views.running(12, kept_until_at="2026-03-02T15:05:00Z"), timedelta(hours=1)
    sentence("keep", result_of_keep(job, hour, NOW))
    over = replace(job.leases[0], over_since_at="2026-03-02T14:04:40Z")
    job.leases = [over, replace(over, stops_at="2026-03-02T14:05:10Z")]
    assert mentions(result_of_keep(job, hour, NOW), "job 12", "15:05", "1h")
    assert result_of_keep(job, hour, NOW) != result_of_keep(views.running(12), hour, NOW)


def test_ordinals() -> None:
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 111)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "111th"]
    )


def test_clocks_name_the_day_when_it_is_another() -> None:
    assert clock("2026-03-02T23:00:00Z", NOW) == "23:00"
    assert clock("2026-03-04T23:00:00Z", NOW) == "Wed 23:00"
    assert clock("2026-05-04T23:00:00Z", NOW) == "2026-05-04 23:00"


@pytest.mark.parametrize("width", range(8))
def test_shortened_text_fits(width: int) -> None:
    assert display_width(shorten("日本語 text", width)) <= width


@pytest.mark.parametrize("text", ["日本語", "e\u0301a\u0308", "train", "🧪 lab", "한국어", "a日b"])
def test_what_is_cut_to_any_width_loses_nothing_and_fits(text: str) -> None:
    for width in range(2, 9):
        lines = [text[begin:end] for begin, end in line_breaks(text, width)]
        assert all(display_width(line) <= width for line in lines)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_lines_break_between_words_where_they_can() -> None:
    text = "no room for 6G before job 12 ends"
    assert [text[begin:end] for begin, end in line_breaks(text, 12)] == [
        "no room for",
        "6G before",
        "job 12 ends",
    ]
    assert list(line_breaks("", 5)) == [(0, 0)]
    assert list(line_breaks("abcdefgh", 3)) == [(0, 3), (3, 6), (6, 8)]


def test_clean_keeps_words_and_drops_controls() -> None:
    assert clean("é日\x1b[0m\n\u200b\udcff") == "é日?[0m???"


def test_the_hint_of_a_reason_is_shown_with_it() -> None:
    job = views.over(17, 126, outcome="launch_failed", reason="cannot run x: no", hint="chmod +x x")
    assert (last_words(job) or "").endswith("chmod +x x")


@pytest.mark.parametrize(
    ("label", "value", "others"),
    [
        ("one", "3", {}),
        ("slurm", "0", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "3"}),
        ("strange", "x\x1b; rm", {}),
    ],
)
def test_visible_devices_before_run_have_no_effect(
    label: str, value: str, others: dict[str, str]
) -> None:
    sentence(f"preset-{label}", preset_devices({"CUDA_VISIBLE_DEVICES": value, **others}))


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_nothing_is_said_of_visible_devices_that_choose_the_cpu(value: str) -> None:
    assert preset_devices({"CUDA_VISIBLE_DEVICES": value}) is None
    assert preset_devices({"CUDA_VISIBLE_DEVICES": "GPU-a", "GPULEASE_JOB": "7"}) is None


@pytest.mark.parametrize(
    ("indices", "typed", "words"),
    [
        ("10", ["tool"], ["--array 10 is one job", "for 10 jobs: --array 0-9"]),
        ("0-9", ["plain.py", "--seed"], ["if --seed", "plain.py --seed {}"]),
        (
            "0-9",
            ["plain.py", "--seed=", "-x"],
            ["--seed= has no", "--seed={}", " -x"],
        ),
        ("0-9", ["plain.py", "", "a b"], ["argument 1", "plain.py {} 'a b'"]),
        ("0-9", ["plain.py", "-s", "$GPULEASE_ARRAY_INDEX"], ["no shell", "-s {}"]),
        ("0-9", ["bash", "-c", "echo {}"], ["{} stays", "use $GPULEASE_ARRAY_INDEX"]),
    ],
)
def test_an_array_that_probably_does_not_do_what_was_meant_says_so_in_one_line(
    indices: str, typed: list[str], words: list[str], tmp_path: Path
) -> None:
    (said,) = doubts(indices, typed, tmp_path)
    assert mentions(said, *words)


@pytest.mark.parametrize(
    ("indices", "typed"),
    [
        ("0", ["tool"]),
        ("0-9", ["plain.py", "a=b", "--epochs=3"]),
        ("0-9", ["reads-index.py", "--amp"]),
        ("0-9", ["plain.py", "--seed", "{}"]),
        ("0-9", ["bash", "-c", "python train.py --seed $GPULEASE_ARRAY_INDEX"]),
    ],
)
def test_nothing_is_said_about_an_array_that_uses_its_index_or_needs_none(
    indices: str, typed: list[str], tmp_path: Path
) -> None:
    assert doubts(indices, typed, tmp_path) == []


def doubts(indices: str, typed: list[str], folder: Path) -> list[str]:
    (folder / "plain.py").write_text("import os")
    (folder / "reads-index.py").write_text("import os\nos.environ['GPULEASE_ARRAY_INDEX']")
    python = ["/usr/bin/python3"] if typed[0].endswith(".py") else []
    return [*array_doubts(indices, typed, [*python, *typed], str(folder))]
