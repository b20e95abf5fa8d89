"""Lines of `gpulease top`: columns, what differs between two lines, and the output of jobs."""

import pytest

from gpulease.cli.top.lines import (
    Column,
    fitted,
    last_difference,
    plain,
    row,
    styled,
    widths,
)
from gpulease.cli.top.poll import MOST_LINES, OutputText
from gpulease.cli.top.screens import keys_in
from gpulease.wire.frames import FrameKind

OUT, ERR = FrameKind.STDOUT, FrameKind.STDERR


def test_only_what_differs_is_painted() -> None:
    one = (("GPU 0 ", "title"), ("12%", ""), (" 61C", "dim"))
    assert last_difference(one, one) == 0
    assert last_difference(one, (one[0], ("13%", ""), one[2])) == 9
    assert last_difference(one, (one[0], ("12%", "bad"), one[2])) == 9
    assert last_difference(one, (*one, ("x", ""))) == 14
    assert last_difference((("日本 1", ""), ("a", "")), (("日本 2", ""), ("a", ""))) == 6


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abc", 5, "abc  "), ("abcdef", 4, "abcd"), ("日本語", 5, "日本 "), ("", 2, "  ")],
)
def test_a_line_is_cut_or_padded_to_its_width(text: str, width: int, expected: str) -> None:
    assert plain(fitted(((text, ""),), width)) == expected


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (40, "Esc back  c cancel  ? help  q quit"),
        (33, "Esc back  c cancel  ? help"),
        (25, "Esc back  ? help"),
        (4, "? help"),
    ],
)
def test_keys_for_which_there_is_no_room_are_left_out_whole(width: int, expected: str) -> None:
    assert keys_in("Esc back  c cancel  ? help  q quit", width) == expected


COLUMNS = (
    Column("JOB", 4, right=True),
    Column("NAME", 6, grows=1, most=20, keeps_end=True),
    Column("LEFT", 5, leaves=1),
    Column("WHY", 6, grows=1),
)


@pytest.mark.parametrize(
    ("width", "expected"),
    [(80, [4, 20, 5, 45]), (40, [4, 12, 5, 13]), (27, [4, 6, 5, 6]), (20, [4, 6, 0, 6])],
)
def test_columns_share_the_width_and_leave_where_it_is_short(
    width: int, expected: list[int]
) -> None:
    assert widths(COLUMNS, width) == expected


def test_cells_are_cut_to_their_columns() -> None:
    cells = [("12", ""), ("sweep-16-s=7", ""), ("2h", ""), ("no room", "dim")]
    assert plain(row(COLUMNS, cells, [4, 6, 0, 6])) == "  12  swe…=7  no ro…"


def test_a_coloured_page_becomes_styled_lines() -> None:
    assert styled("\x1b[1mjob 7\x1b[0m  x\nplain\n") == [
        (("job 7", "title"), ("  x", "")),
        (("plain", ""),),
    ]


def output(*pieces: bytes) -> list[str]:
    text = OutputText()
    for piece in pieces:
        text.feed(OUT, piece)
    return text.lines()


def test_output_is_cut_into_lines_wherever_the_pieces_end() -> None:
    assert output(b"one\ntw", b"o\nthr\xc3", b"\xa9e") == ["one", "two", "thrée"]


def test_a_progress_bar_shows_its_last_state() -> None:
    assert output(b"10%\r", b"20%\r", b"30%\r\nnext") == ["30%", "next"]
    assert output(b"10%\r20%\r") == ["20%"]


def test_output_cannot_control_the_terminal() -> None:
    shown = output(b"\x1b[31mred\x1b[0m \x1b]0;title\x07x\x1b[2J\x08\x07\tz\x1b(B\n")
    assert shown == ["red x?? z"]


def test_the_streams_of_a_job_do_not_mix_within_a_line() -> None:
    text = OutputText()
    text.feed(OUT, b"loss ")
    text.feed(ERR, b"warning\n")
    text.feed(OUT, b"0.5\n")
    assert text.lines() == ["warning", "loss 0.5"]


def test_output_is_bounded() -> None:
    text = OutputText()
    text.feed(OUT, b"x\n" * (MOST_LINES + 5))
    text.feed(ERR, b"y" * 10_000_000)
    lines = text.lines()
    assert len(lines) <= MOST_LINES + 1
    assert max(map(len, lines)) <= 2000
