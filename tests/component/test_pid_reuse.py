"""Pids that the driver goes on listing when they have been given to somebody else."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.host import processes
from gpulease.host.processes import PidReuse
from gpulease.record import replace
from gpulease.shim.process_tree import Entry, entry


def test_who_is_listed_from_the_first_is_who_it_is() -> None:
    known = PidReuse()
    assert [known.reused([os.getpid(), 1]) for _ in range(3)] == [frozenset()] * 3


def test_a_number_that_is_given_away_while_it_is_listed_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel cannot be made to give a number again, but for root: who has it is set here."""
    real: Callable[[int], Entry | None] = entry
    with subprocess.Popen(["sleep", "600"]) as first:
        known, pid = PidReuse(), first.pid
        assert known.reused([pid]) == frozenset()
        found = real(pid)
        assert found is not None
        first.kill()
    assert not Path(f"/proc/{pid}").exists()
    assert known.reused([pid]) == frozenset(), "there is nobody to take it for"
    later = replace(found, started=found.started + 1)
    monkeypatch.setattr(processes, "entry", lambda _: later)
    assert known.reused([pid]) == {pid}
    assert known.reused([pid]) == {pid}, "as long as it is listed"
    assert known.reused([]) == frozenset()
    assert known.reused([pid]) == frozenset(), "listed anew it is whoever has it now"


def test_one_that_was_dead_when_it_was_first_listed_stays_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, mine = PidReuse(), entry(os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(processes, "entry", lambda _: None)
        assert known.reused([os.getpid()]) == frozenset()
    assert mine is not None
    assert known.reused([os.getpid()]) == {os.getpid()}
