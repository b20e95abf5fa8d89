"""Which jobs a command line names: numbers, names, last, --name, --all."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from daemon_stand_in import views
from goldens import mentions
from gpulease.cli.job_selection import names_array, select_jobs, selection
from gpulease.cli.render import own_name
from gpulease.client import Client
from gpulease.errors import BadUsage, NoSuchJob, WrongState
from gpulease.wire.jobs import JobList, JobView, QueueView

if TYPE_CHECKING:
    from gpulease.cli.job_selection import Verb


ME = own_name()


class Listing:
    """A daemon that only lists jobs, and notes what it was asked."""

    def __init__(self, *jobs: JobView) -> None:
        self.of = list(jobs)
        self.asked: list[tuple[bool, str | None]] = []

    def jobs(self, *, everything: bool = False, user: str | None = None) -> JobList:
        self.asked.append((everything, user))
        shown = [job for job in self.of if everything or job.state != "ended"]
        return JobList([job for job in shown if user in (None, job.user)])


SWEEP = (
    views.running(3, user=ME, name="sweep-1", claim=views.claim()),
    views.job(4, user="bob", name="sweep-2"),
    views.over(5, 0, user=ME, name="sweep-1"),
    views.job(6, user=ME, name="sweep-3", claim=views.claim(time_limit=60.0)),
    views.running(7, user=ME, name="train", claim=views.claim()),
    views.over(8, 1, user=ME, name="eval"),
)


def select(
    listing: Listing, verb: "Verb", *words: str, pattern: str | None = None, every: bool = False
) -> list[int]:
    return select_jobs(cast("Client", listing), selection(verb, words, pattern, every))


def selected(verb: "Verb", *words: str, **how: Any) -> list[int]:
    return select(Listing(*SWEEP), verb, *words, **how)


def test_numbers_are_taken_as_they_are_and_cost_no_request() -> None:
    listing = Listing()
    assert select(listing, "cancel", "9", "4", "9") == [9, 4]
    assert listing.asked == []


def test_names_and_last_are_the_callers_own_jobs_in_one_request() -> None:
    listing = Listing(*SWEEP)
    assert select(listing, "show", "train", "last", "4") == [
        7,
        8,
        4,
    ]
    assert listing.asked == [(True, ME)]
    with pytest.raises(NoSuchJob):
        selected("show", "sweep-2")


def test_of_several_jobs_with_a_name_the_newest_is_shown_and_a_message_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert selected("logs", "sweep-1") == [5]
    assert "2 of your jobs" in capsys.readouterr().err


def test_attach_prefers_a_live_job() -> None:
    assert selected("attach", "sweep-1") == [3]
    assert selected("attach", pattern="sweep-*") == [6]


def test_a_name_of_an_ended_job_is_not_cancelled() -> None:
    assert selected("cancel", "sweep-1") == [3]
    with pytest.raises(NoSuchJob):
        selected("cancel", "eval")


def test_a_name_of_several_live_jobs_cancels_none_and_names_them() -> None:
    twice = Listing(*(views.job(number, user=ME, name="x") for number in (3, 4)))
    with pytest.raises(BadUsage) as refused:
        select(twice, "cancel", "x")
    assert "3 (x), 4 (x)" in refused.value.message
    assert select(twice, "wait", pattern="x") == [3, 4]


@pytest.mark.parametrize(
    ("verb", "numbers"),
    [("extend", [6]), ("keep", [3, 7]), ("show", [3, 6, 7])],
)
def test_all_is_the_live_jobs_that_the_verb_applies_to(
    verb: "Verb", numbers: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert selected(verb, every=True) == numbers
    assert f"{min(numbers)} (" in capsys.readouterr().err


def test_a_pattern_matches_ended_jobs_where_nothing_is_changed() -> None:
    assert selected("show", pattern="sweep*") == [3, 5, 6]
    assert selected("wait", pattern="sweep*") == [3, 6]
    assert selected("requeue", pattern="sweep*") == [3]
    with pytest.raises(NoSuchJob):
        selected("extend", pattern="nothing*")


@pytest.mark.parametrize("form", ["{}", "1_{}"])
def test_a_number_that_python_refuses_to_read_is_the_name_of_no_job(form: str) -> None:
    with pytest.raises(NoSuchJob):
        selected("show", form.format("9" * 5000))


def test_the_hint_for_a_name_of_several_jobs_matches_that_name_only() -> None:
    named = [views.job(number, user=ME, name="lr[0.1]") for number in (3, 4)]
    with pytest.raises(BadUsage) as refused:
        select(Listing(*named), "cancel", "lr[0.1]")
    hint = refused.value.hint or ""
    pattern = shlex.split(hint[hint.index("--name") :])[1]
    assert select(Listing(*named), "wait", pattern=pattern) == [3, 4]


def test_all_of_no_jobs_is_none_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert select(Listing(), "extend", every=True) == []
    assert "no jobs to extend" in capsys.readouterr().err


class Arrays(Listing):
    """A daemon with array 20, of which the first element has ended."""

    def elements(
        self, array: int, index: int | None = None, *, everything: bool = True
    ) -> list[JobView]:
        return [
            job
            for job in self.of
            if job.queue is not None
            and job.queue.array == array
            and index in (None, job.queue.array_index)
            and (everything or job.state != "ended")
        ]


def _element(number: int, index: int, state: str = "queued") -> JobView:
    queue = QueueView("normal", 0, False, None, [], False, False, 20, index, None, 0)
    changed = {"user": ME, "name": "sweep", "label": f"20_{index}", "queue": queue}
    if state == "ended":
        return views.over(number, 0, **changed)
    return views.job(number, state=state, **changed)


ARRAY = (
    _element(20, 0, "ended"),
    _element(21, 1),
    _element(22, 2),
    _element(23, 1, "active"),
)


@pytest.mark.parametrize(
    ("verb", "word", "found"),
    [
        ("show", "20_2", [22]),
        ("logs", "20_1", [23]),
        ("requeue", "20", [23]),
        ("edit", "20", [21, 22]),
        ("cancel", "20", [20]),
        ("show", "20", [20]),
        ("cancel", "last", [21, 22, 23]),
        ("show", "last", [20]),
        ("logs", "sweep", [20]),
        ("wait", "sweep", [20, 21, 22, 23]),
        ("keep", "sweep", [23]),
    ],
)
def test_an_element_is_found_by_its_index_and_an_array_is_all_its_elements(
    verb: "Verb", word: str, found: list[int]
) -> None:
    assert select(Arrays(*ARRAY), verb, word) == found


def test_an_array_of_which_a_verb_applies_to_no_element_is_refused() -> None:
    for verb, word in (("requeue", "20"), ("keep", "sweep"), ("extend", "last")):
        with pytest.raises(WrongState, match="array 20: none of its elements"):
            select(Arrays(*ARRAY[:3]), cast("Verb", verb), word)


def test_the_elements_of_an_array_are_not_several_jobs_of_one_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    select(Arrays(*ARRAY), "wait", "sweep")
    assert capsys.readouterr().err == ""
    before = views.over(3, 0, user=ME, name="sweep")
    select(Arrays(before, *ARRAY), "wait", "sweep")
    assert mentions(capsys.readouterr().err, "2 of your jobs", "this is array 20")


def test_an_array_without_its_first_element_is_shown_by_its_newest() -> None:
    assert select(Arrays(*ARRAY[1:]), "show", "last") == [23]


def test_last_and_a_name_mean_the_array_unless_its_first_element_is_named() -> None:
    first, second = ARRAY[:2]
    assert names_array(["last"], first) and names_array(["sweep"], first)
    assert names_array(["20"], first)
    assert not names_array(["20_0", "last"], first)
    assert not names_array(["last"], second)


def test_an_index_that_an_array_does_not_have_is_refused() -> None:
    with pytest.raises(NoSuchJob):
        select(Arrays(*ARRAY), "cancel", "20_7")


PREEMPTED = (
    views.over(3, 1, user=ME, name="a", retried_as=7),
    views.job(5, user=ME, name="b"),
    views.job(7, user=ME, name="a", retry_of=3),
)


def test_last_is_what_was_submitted_last_and_not_what_was_queued_again() -> None:
    assert select(Listing(*PREEMPTED), "cancel", "last") == [5]
    assert select(Listing(*PREEMPTED[1:]), "cancel", "last") == [5], "the first is purged"


def test_of_a_last_submission_that_was_queued_again_last_is_the_latest_attempt() -> None:
    twice = views.job(9, user=ME, retry_of=7)
    first, other, second = PREEMPTED
    again = replace(second, state="ended", retried_as=9)
    listing = Listing(other, first, again, twice)
    assert select(Listing(first, again, twice), "show", "last") == [9]
    assert select(listing, "show", "last") == [5]
    assert select(listing, "show", "a") == [7], "also by name"


def test_an_array_that_was_submitted_last_is_last_after_an_older_job_was_queued_again() -> None:
    continued = views.job(24, user=ME, name="old", retry_of=3)
    assert select(Arrays(*PREEMPTED[:2], *ARRAY, continued), "cancel", "last") == [21, 22, 23]
    element = replace(_element(25, 2), retry_of=22)
    assert 25 in select(Arrays(*ARRAY, element), "cancel", "last")


@pytest.mark.parametrize(
    ("verb", "words", "found"),
    [
        ("cancel", ["3-7", "9"], [3, 6, 7, 9]),
        ("cancel", ["7,3-6"], [7, 3, 6]),
        ("show", ["5-9"], [5, 6, 7, 8]),
        ("edit", ["1-99", "last"], [6, 8]),
        ("requeue", ["3-7"], [3, 7]),
    ],
)
def test_a_range_is_the_callers_own_jobs_to_which_the_verb_applies(
    verb: "Verb", words: list[str], found: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert selected(verb, *words) == found
    assert mentions(capsys.readouterr().err, "(sweep-3)" if 6 in found else "(train)")


def test_a_range_without_jobs_of_the_caller_is_refused() -> None:
    for verb, word in (("cancel", "4-5"), ("cancel", "90-99"), ("show", "7-3"), ("attach", "3-7")):
        with pytest.raises(NoSuchJob) as refused:
            selected(cast("Verb", verb), word)
        assert word in refused.value.message


def test_only_verbs_that_change_nothing_mean_the_last_job_where_none_is_named() -> None:
    for verb in ("show", "logs", "attach"):
        assert selected(cast("Verb", verb)) == selected(cast("Verb", verb), "last")
    for verb in ("cancel", "requeue", "wait", "edit", "keep"):
        with pytest.raises(BadUsage):
            selected(cast("Verb", verb))
