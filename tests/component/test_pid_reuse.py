"""Pids that the driver lists on after another process has got them."""

import os

from gpulease.host.processes import PidReuse
from gpulease.record import replace
from gpulease.shim.process_tree import Entry, entry


def test_a_pid_that_another_process_has_got_while_it_was_listed_is_nobodys() -> None:
    first = entry(os.getpid())
    assert first is not None
    there: dict[int, Entry] = {7: first}
    known = PidReuse(there.get)
    assert [known.reused([7]) for _ in range(3)] == [frozenset()] * 3
    del there[7]
    assert known.reused([7]) == frozenset(), "there is nobody to take it for"
    there[7] = replace(first, started=first.started + 1)
    assert known.reused([7]) == {7}
    assert known.reused([7]) == {7}, "as long as it is listed"
    assert known.reused([]) == frozenset()
    assert known.reused([7]) == frozenset(), "listed again it belongs to who has it now"


def test_one_that_was_dead_when_it_was_first_listed_stays_nobodys() -> None:
    there: dict[int, Entry] = {}
    known, mine = PidReuse(there.get), entry(os.getpid())
    assert known.reused([7]) == frozenset()
    assert mine is not None
    there[7] = mine
    assert known.reused([7]) == {7}
