"""Pids that the driver lists on after another process has got them."""

from gpulease.host.processes import PidReuse


def test_a_pid_that_another_process_has_got_while_it_was_listed_is_nobodys() -> None:
    known = PidReuse()
    assert [known.reused({7: 100}) for _ in range(3)] == [frozenset()] * 3
    assert known.reused({7: None}) == frozenset(), "there is nobody to take it for"
    assert known.reused({7: 101}) == {7}
    assert known.reused({7: 101}) == {7}, "as long as it is listed"
    assert known.reused({}) == frozenset()
    assert known.reused({7: 101}) == frozenset(), "listed again it belongs to who has it now"


def test_one_that_was_dead_when_it_was_first_listed_stays_nobodys() -> None:
    known = PidReuse()
    assert known.reused({7: None}) == frozenset()
    assert known.reused({7: 100}) == {7}
