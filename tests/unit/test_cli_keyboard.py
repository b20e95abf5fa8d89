"""What keys mean while attached: when Ctrl-C insists, and what a watcher may still do."""

import signal

import pytest

from gpulease.cli.attachment.keyboard import DEFAULT, Controls, Keyboard, Pressed, Use, parse_keys

KEYS = parse_keys(DEFAULT)


def keyboard(use: Use = Use.WRITE, controls: Controls | None = None) -> Keyboard:
    return Keyboard(KEYS, controls or Controls(), use)


def test_ctrl_c_twice_with_nothing_but_its_echo_between_asks_to_cancel() -> None:
    board = keyboard()
    assert board.press(b"\x03", 10.0) == Pressed(b"\x03", interrupt=True)
    board.heard(b"^")
    board.heard(b"C")
    assert board.press(b"\x03", 10.9) == Pressed(b"\x03", interrupt=True, cancel=True)


@pytest.mark.parametrize(
    "shown",
    [b"", b"^C\r\nTraceback", b"\r\n(Pdb) ", b"^C^C", b"47%|####", b"^C" + b"x" * 100],
)
def test_a_job_that_answers_or_echoes_nothing_is_not_cancelled(shown: bytes) -> None:
    board = keyboard()
    board.press(b"\x03", 10.0)
    board.heard(shown)
    assert not board.press(b"\x03", 10.1).cancel


def test_ctrl_c_twice_slowly_or_with_typing_between_does_not_cancel() -> None:
    board = keyboard()
    board.press(b"\x03", 10.0)
    board.heard(b"^C")
    assert not board.press(b"\x03", 11.5).cancel
    board.heard(b"^C")
    board.press(b"q", 11.6)
    board.heard(b"^C")
    assert not board.press(b"\x03", 11.7).cancel


def test_another_interrupt_character_is_the_one_that_counts() -> None:
    board = keyboard(controls=Controls(interrupt=b"\x7f"))
    board.press(b"\x7f", 10.0)
    board.heard(b"^?")
    assert board.press(b"\x7f", 10.5).cancel
    silent = keyboard(controls=Controls(interrupt=b""))
    silent.press(b"\x03", 10.0)
    silent.heard(b"^C")
    assert not silent.press(b"\x03", 10.5).cancel


def test_where_the_job_reads_no_keys_they_are_signals() -> None:
    board = keyboard(Use.COMMAND)
    assert board.press(b"abc\r", 1.0) == Pressed()
    assert board.press(b"\x03", 1.0) == Pressed(signals=(signal.SIGINT,))
    assert board.press(b"\x1c\x1c", 1.0) == Pressed(signals=(signal.SIGQUIT,))
    assert board.press(b"\x1a", 1.0) == Pressed(suspend=True)
    assert board.press(b"\x1cd", 1.0) == Pressed(detach=True)


def test_nothing_that_a_watcher_types_reaches_the_job() -> None:
    board = keyboard(Use.WATCH)
    for key in range(256):
        pressed = board.press(bytes([key]), 1.0)
        assert not pressed.passed
        assert not pressed.signals
        assert not pressed.cancel
    assert board.press(b"\x03", 1.0) == Pressed(detach=True)
