"""A queue that is longer than a screen: what `status` shows of it, and lists in pages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from daemon_rig import Daemon
from goldens import mentions

ELEMENTS = 30
RUNNING = 2


@pytest.fixture(scope="module")
def array(standing: Daemon) -> int:
    """Return an array of which as many elements run as there are GPUs."""
    options = ("--mem", "7G", "--array", f"0-{ELEMENTS - 1}")
    first = int(standing.run("run", *options, "sleep", "600").stdout)
    for number in range(first, first + RUNNING):
        standing.wait_until(number, "active")
    return first


def _pages(standing: Daemon, **query: Any) -> Iterator[Sequence[int]]:
    after = None
    while True:
        page = standing.client.jobs(after=after, limit=7, **query)
        assert page.total == ELEMENTS
        yield [job.id for job in page.jobs]
        if page.next is None:
            return
        after = page.next


def _states(shown: Mapping[str, Any]) -> Sequence[str]:
    return [job["state"] for job in shown["jobs"]]


def test_a_status_has_the_first_of_the_queue_and_says_how_to_have_all(
    standing: Daemon, array: int
) -> None:
    shown = json.loads(standing.run("status", "--json").stdout)
    assert _states(shown) == ["active"] * RUNNING + ["queued"] * 20
    assert [job["position"] for job in shown["jobs"][RUNNING:]] == [*range(1, 21)]
    assert shown["waiting"] == ELEMENTS - RUNNING

    complete = json.loads(standing.run(*shown["more"].split()[1:]).stdout)
    assert [job["id"] for job in complete["jobs"]] == [*range(array, array + ELEMENTS)]
    assert complete["more"] is None
    assert _states(json.loads(standing.run("status", "--json", "--queue", "0").stdout)) == (
        ["active"] * RUNNING
    )
    assert mentions(standing.run("status").stdout, "8 more", "--queue all")
    refused = standing.run("status", "--queue", "few", check=False)
    assert refused.returncode == 125
    assert mentions(refused.stderr, "'few'", "--queue 50")


def test_pages_have_every_job_once_in_both_orders(standing: Daemon, array: int) -> None:
    every = [*range(array, array + ELEMENTS)]
    for query in ({}, {"everything": True}):
        oldest = [*_pages(standing, **query)]
        assert [len(page) for page in oldest] == [7, 7, 7, 7, 2]
        assert [number for page in oldest for number in page] == every
        newest = [number for page in _pages(standing, newest=True, **query) for number in page]
        assert newest == every[::-1]


def test_a_status_is_no_larger_behind_ten_thousand_jobs(standing: Daemon, array: int) -> None:
    del array
    before = len(standing.client.status_json(queue=20))
    more = int(standing.run("run", "--mem", "7G", "--array", "0-9999", "true").stdout)
    status = standing.client.status(queue=20)
    assert status.waiting == ELEMENTS - RUNNING + 10_000
    assert len(standing.client.status_json(queue=20)) <= 1.1 * before
    standing.run("cancel", str(more))
