"""What a job switched on in the terminal is switched off when the job is left behind."""

from hypothesis import given
from hypothesis import strategies as st

from gpulease.cli.attachment.terminal import Modes


def undone(*pieces: bytes) -> bytes:
    modes = Modes()
    for piece in pieces:
        modes.note(piece)
    return modes.undo()


def test_a_full_screen_program_is_tidied_up_after() -> None:
    vim = b"\x1b[?1049h\x1b[22;0;0t\x1b[?1h\x1b=\x1b[?2004h\x1b[?25l text \x1b[?1000;1006h"
    back = undone(vim)
    assert back == (b"\x1b[?1006l\x1b[?1000l\x1b[?25h\x1b[?2004l\x1b[?1l\x1b[?1049l\x1b[0m")


def test_what_was_switched_off_again_is_left_alone() -> None:
    assert undone(b"\x1b[?25l 47% \x1b[?25h", b"\x1b[?1049h...\x1b[?1049l") == b""


def test_modes_that_are_no_concern_of_ours_stay() -> None:
    assert undone(b"\x1b[?7l\x1b[?12h\x1b[?69h") == b""


@given(st.integers(0, 40), st.integers(0, 40))
def test_a_switch_is_seen_however_it_is_cut(first: int, second: int) -> None:
    text = b"ab\x1b[?25lcd\x1b[?1049;1000hef\x1b[?1000l"
    begin, end = sorted((first, second))
    assert undone(text[:begin], text[begin:end], text[end:]) == b"\x1b[?1049l\x1b[?25h\x1b[0m"
