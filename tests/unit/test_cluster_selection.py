"""Which entries of Slurm's queue a number means."""

import pytest

from gpulease.slurm.command.selection import by_array, in_range, is_array, is_of
from gpulease.slurm.records import is_number
from unit.test_cluster_jobs import job

ELEMENT = job(jobid="20", arrayjobid="17", arraytaskid="3")
REST = job(jobid="17", arrayjobid="17", arraytaskid="4-9")
PLAIN = job(jobid="12", arrayjobid="12")


@pytest.mark.parametrize(
    ("word", "expected"),
    [("17", [ELEMENT, REST]), ("17_3", [ELEMENT]), ("20", [ELEMENT]), ("12", [PLAIN]), ("1", [])],
)
def test_a_number_means_a_job_an_element_or_an_array(
    word: str, expected: list[dict[str, str]]
) -> None:
    assert [row for row in (ELEMENT, REST, PLAIN) if is_of(word, row)] == expected


def test_an_array_is_named_by_its_own_number_only() -> None:
    assert is_array("17", [ELEMENT, REST])
    assert not is_array("20", [ELEMENT])
    assert not is_array("17_3", [ELEMENT])
    assert not is_array("12", [PLAIN])


def test_elements_are_one_entry_by_array() -> None:
    assert by_array([PLAIN, ELEMENT, REST]) == {"12": [PLAIN], "17": [ELEMENT, REST]}


def test_a_range_is_the_jobs_and_whole_arrays_between_two_numbers() -> None:
    own = by_array([PLAIN, ELEMENT, REST])
    assert in_range(own, (12, 16)) == {"12": [PLAIN]}
    assert list(in_range(own, (12, 17))) == ["12", "17"]
    assert in_range(own, (18, 20)) == {}, "the elements have the number of their array"


@pytest.mark.parametrize(
    ("word", "expected"),
    [("17", True), ("17_3", True), ("17_", False), ("-1", False), ("1\n", False), ("٣", False)],
)
def test_only_digits_are_the_number_of_a_job(word: str, expected: bool) -> None:
    assert is_number(word) is expected
