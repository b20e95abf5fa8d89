"""The record of a launch: what is written is read back, and what is torn is not."""

import json
import os
from datetime import UTC, datetime
from errno import E2BIG, EACCES, ENOENT, ENOEXEC
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.record import replace
from gpulease.shim.record import (
    EXEC,
    NAME,
    SIZE,
    Exited,
    Failure,
    MainExited,
    Record,
    Started,
    claim,
    forbid,
    is_alive,
    parse,
    read_record,
)

AT = "2026-01-02T03:04:05.678Z"
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
LINES = [
    {"event": "started", "pid": 5, "shim_pid": 4, "started_at": AT},
    {"event": "stopping", "reason": "cancelled", "at": AT},
    {"event": "main_exited", "signal": 15, "at": AT},
    {"event": "exited", "reason": "cancelled", "signal": 15, "main_exited_at": AT, "ended_at": AT},
]
WHOLE = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)
STEPS = [
    Record(),
    Record(Started(5, 4, MOMENT)),
    Record(Started(5, 4, MOMENT), "cancelled"),
    Record(Started(5, 4, MOMENT), "cancelled", MainExited(None, 15, MOMENT)),
    Record(
        Started(5, 4, MOMENT),
        "cancelled",
        MainExited(None, 15, MOMENT),
        Exited("cancelled", None, 15, MOMENT, MOMENT),
    ),
]


@pytest.fixture
def directory(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_a_whole_record_is_read() -> None:
    assert parse(WHOLE) == STEPS[-1]


@given(st.integers(0, len(WHOLE)), st.integers(0, 100))
def test_a_record_that_ends_anywhere_is_read_up_to_its_last_whole_line(
    length: int, zeros: int
) -> None:
    text = WHOLE[:length]

    assert parse(text + bytes(zeros)) == STEPS[text.count(b"\n")]


@given(st.binary(max_size=200))
def test_no_bytes_can_break_the_reader(tail: bytes) -> None:
    first = WHOLE.partition(b"\n")[0] + b"\n"

    assert parse(first + b"\0" + tail) == STEPS[1]
    assert isinstance(parse(tail), Record)


@pytest.mark.parametrize("line", [b"null", b"[]", b"{}", b'{"event": "started"}', b"7", b'"x"'])
def test_a_line_of_another_shape_ends_the_record(line: bytes) -> None:
    assert parse(line + b"\n" + WHOLE) == Record()


def test_lines_of_a_later_version_are_passed_over() -> None:
    assert parse(b'{"event": "frozen", "why": 1}\n' + WHOLE) == STEPS[-1]


def test_a_failed_launch_keeps_its_sentence() -> None:
    failed = Failure("cwd", ENOENT, "cannot start in /x: gone", "go elsewhere")
    line = {
        "event": "exited",
        "reason": "launch_failed",
        "exit_code": 125,
        "ended_at": AT,
        "failed": vars(failed),
    }

    record = parse(json.dumps(line).encode() + b"\n")

    assert record.exited is not None and record.exited.failed == failed


@pytest.mark.parametrize(
    ("step", "number", "code"),
    [
        (EXEC, ENOENT, 127),
        (EXEC, EACCES, 126),
        (EXEC, ENOEXEC, 126),
        (EXEC, E2BIG, 125),
        ("cwd", ENOENT, 125),
        ("worker", None, 125),
    ],
)
def test_a_failure_exits_as_a_shell_would(step: str, number: int | None, code: int) -> None:
    assert Failure(step, number, "x").exit_code == code


def test_a_directory_without_a_record_was_never_launched(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    assert not is_alive(tmp_path)


def test_a_record_can_be_claimed_once(directory: int, tmp_path: Path) -> None:
    first = claim(directory)

    assert first is not None
    assert claim(directory) is None
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert read_record(tmp_path) == Record()


def test_a_record_begins_with_the_shim_that_made_it(directory: int, tmp_path: Path) -> None:
    writer = claim(directory, 4)
    assert writer is not None
    assert read_record(tmp_path) == Record(claimed_by=4)

    for line in LINES:
        writer.append(line)
    assert read_record(tmp_path) == replace(STEPS[-1], claimed_by=4)


def test_a_record_is_locked_while_its_maker_lives(directory: int, tmp_path: Path) -> None:
    assert claim(directory) is not None and is_alive(tmp_path)

    child = os.fork()
    if child == 0:
        os.closerange(3, 100)
        os._exit(0)
    os.waitpid(child, 0)

    assert is_alive(tmp_path)


def test_after_a_launch_was_forbidden_none_can_come(directory: int, tmp_path: Path) -> None:
    assert forbid(tmp_path)

    assert claim(directory) is None
    assert not is_alive(tmp_path)
    record = read_record(tmp_path)
    assert record is not None and record.started is None
    assert record.exited is not None and record.exited.reason == "cancelled"


def test_a_launch_that_has_begun_cannot_be_forbidden(directory: int, tmp_path: Path) -> None:
    assert claim(directory) is not None

    assert not forbid(tmp_path)
    assert read_record(tmp_path) == Record()


def test_what_is_appended_is_read(directory: int, tmp_path: Path) -> None:
    writer = claim(directory)
    assert writer is not None
    for count, line in enumerate(LINES, 1):
        writer.append(line)
        assert read_record(tmp_path) == STEPS[count]

    assert (tmp_path / NAME).stat().st_size == SIZE


def test_a_full_record_refuses_more(directory: int, tmp_path: Path) -> None:
    writer = claim(directory)
    assert writer is not None
    writer.append(LINES[0])

    with pytest.raises(OSError, match="full"):
        writer.append({"event": "x", "text": "x" * SIZE})

    assert read_record(tmp_path) == STEPS[1]
