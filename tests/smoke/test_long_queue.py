"""A queue that is longer than a screen: what `status` shows of it, and lists in pages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from daemon_rig import Daemon
from daemon_stand_in.terminal import Terminal
from goldens import mentions

ELEMENTS = 30
RUNNING = 2
LARGEST_ROW = 4_000
"""Bytes of a waiting job."""


@pytest.fixture(scope="module")
def array(standing: Daemon) -> int:
    """Return an array of which as many elements run as there are GPUs."""
    options = ("--mem", "7G", "--array", f"0-{ELEMENTS - 1}")
    first = int(standing.run("run", *options, "sleep", "600").stdout)
    for number in range(first, first + RUNNING):
        standing.wait_until(number, "active")
    return first


def _states(shown: Mapping[str, Any]) -> Sequence[str]:
    return [job["state"] for job in shown["jobs"]]


def test_a_status_has_the_first_rows_of_the_queue_and_says_how_to_have_all(
    standing: Daemon, array: int
) -> None:
    shown = json.loads(standing.run("status", "--json").stdout)
    assert _states(shown) == ["active"] * RUNNING + ["queued"]
    assert shown["jobs"][RUNNING]["position"] == 1
    waiting = {"indices": f"{RUNNING}-{ELEMENTS - 1}", "jobs": ELEMENTS - RUNNING}
    assert shown["jobs"][RUNNING]["queue"]["array_waiting"] == waiting
    assert shown["waiting"] == ELEMENTS - RUNNING

    complete = json.loads(standing.run(*shown["more"].split()[1:]).stdout)
    assert [job["id"] for job in complete["jobs"]] == [*range(array, array + ELEMENTS)]
    assert complete["more"] is None
    assert _states(json.loads(standing.run("status", "--json", "--queue", "0").stdout)) == (
        ["active"] * RUNNING
    )
    page = standing.run("status").stdout
    assert mentions(page, f"{array}_[{RUNNING}-{ELEMENTS - 1}]")
    assert "more: " not in page
    refused = standing.run("status", "--queue", "few", check=False)
    assert refused.returncode == 2
    assert mentions(refused.stderr, "'few'", "--queue 50")


def test_a_list_has_the_first_jobs_and_with_ended_ones_the_last(
    standing: Daemon, array: int
) -> None:
    def listed(*options: str) -> Sequence[int]:
        shown = json.loads(standing.run("list", "--json", *options).stdout)
        return [job["id"] for job in shown["jobs"]]

    every = [*range(array, array + ELEMENTS)]
    assert listed() == listed("--limit", "all") == every
    assert listed("--limit", "3") == every[:3]
    assert listed("--all", "--limit", "3") == every[-3:]
    assert listed("--state", "failed", "--limit", "3") == []
    assert mentions(standing.run("list", "--limit", "3").stdout, "27 more", "--limit all")
    assert mentions(standing.run("list", "--all", "--limit", "3").stdout, "27 older")
    assert standing.run("list", "--limit", "0", check=False).returncode == 2


def test_ten_thousand_elements_take_one_row_of_a_status(standing: Daemon, array: int) -> None:
    before = len(standing.client.status_json(queue=20))
    more = int(standing.run("run", "--mem", "7G", "--array", "0-9999", "true").stdout)
    status = standing.client.status(queue=20)
    assert status.waiting == ELEMENTS - RUNNING + 10_000
    assert len(standing.client.status_json(queue=20)) <= before + LARGEST_ROW
    page = standing.run("status", "--queue", "1").stdout
    assert mentions(page, f"{array}_[{RUNNING}-{ELEMENTS - 1}]", "10000 more", "gpulease list")
    assert mentions(standing.run("status").stdout, f"{more}_[0-9999]")
    standing.run("cancel", str(more))


def test_an_array_hides_no_job_behind_it_on_a_terminal(standing: Daemon, array: int) -> None:
    many = standing.run("run", "--mem", "1G", "--held", "--array", "0-249", "true").stdout.strip()
    behind = standing.run("run", "-d", "--mem", "1G", "--held", "--name", "behind", "true").stdout
    try:
        # With --all, other tests have filled the hundred rows.
        for options, first in (((), f"{array}_0"), (("--all",), "behind")):
            terminal = Terminal(standing.gpulease("list", *options), (50, 120))
            assert terminal.finish() == 0
            assert mentions(terminal.shown, f"{many}_[0-249]", "behind", first)
            assert options or "--limit" not in terminal.shown
    finally:
        standing.run("cancel", many, behind.strip())
