"""Pids that the driver goes on listing when they have been given to somebody else."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.host import processes
from gpulease.host.processes import Listing
from gpulease.shim.process_tree import Entry, entry


def test_who_is_listed_from_the_first_is_who_it_is() -> None:
    known = Listing()
    assert [known.inherited([os.getpid(), 1]) for _ in range(3)] == [frozenset()] * 3


def test_a_number_that_is_given_away_while_it_is_listed_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel cannot be made to give a number again, but for root: who has it is set here."""
    real: Callable[[int], Entry | None] = entry
    with subprocess.Popen(["sleep", "600"]) as first:
        known, pid = Listing(), first.pid
        assert known.inherited([pid]) == frozenset()
        found = real(pid)
        assert found is not None
        first.kill()
    assert not Path(f"/proc/{pid}").exists()
    assert known.inherited([pid]) == frozenset(), "there is nobody to take it for"
    later = found._replace(started=found.started + 1)
    monkeypatch.setattr(processes, "entry", lambda _: later)
    assert known.inherited([pid]) == {pid}
    assert known.inherited([pid]) == {pid}, "as long as it is listed"
    assert known.inherited([]) == frozenset()
    assert known.inherited([pid]) == frozenset(), "listed anew it is whoever has it now"


def test_one_that_was_dead_when_it_was_first_listed_stays_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, mine = Listing(), entry(os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(processes, "entry", lambda _: None)
        assert known.inherited([os.getpid()]) == frozenset()
    assert mine is not None
    assert known.inherited([os.getpid()]) == {os.getpid()}
