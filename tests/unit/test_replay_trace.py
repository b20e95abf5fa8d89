"""Traces: what is read, what is refused and with which words, and what is written."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from goldens import mentions
from gpulease.errors import BadValue
from gpulease.replay.trace import (
    Run,
    Server,
    Trace,
    TraceJob,
    parse_servers,
    read_trace,
    refuse_too_large,
    too_large,
    write_runs,
)
from gpulease.units import GIB, MIB

HEADER = "job,submit_s,duration_s,gpus,memory_mib,user,time_limit_s"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def read(path: Path, *lines: str, header: str = HEADER) -> Trace:
    path.write_text("\n".join((header, *lines)) + "\n", encoding="utf-8")
    return read_trace(path)


def refused(path: Path, *lines: str, header: str = HEADER) -> BadValue:
    with pytest.raises(BadValue) as found:
        read(path, *lines, header=header)
    return found.value


def test_a_line_becomes_a_job(path: Path) -> None:
    trace = read(path, "a-1,10.5,60,2,4096,alice,3600")

    assert trace.jobs == (TraceJob(1, 10.5, 60, 2, 4096 * MIB, "alice", 3600),)
    assert trace.names[1] == "a-1"


def test_columns_may_have_any_order_and_unknown_ones_are_ignored(path: Path) -> None:
    header = "queue,user,gpus, Memory_MiB ,time_limit_s,job,duration_s,submit_s"

    (job,) = read(path, "short,bob,1,1024,,x,60,5", header=header).jobs

    assert (job.user, job.memory, job.submit_s) == ("bob", GIB, 5)


def test_jobs_are_in_the_order_of_their_submission(path: Path) -> None:
    trace = read(path, "late,9,1,1,1,a,", "first,1,1,1,1,a,", "second,1,1,1,1,a,")

    assert [trace.names[job.id] for job in trace.jobs] == ["first", "second", "late"]
    assert [job.id for job in trace.jobs] == [1, 2, 3]


def test_runs_of_one_script_are_similar_and_those_with_the_same_arguments_alike(path: Path) -> None:
    first, second, none = read(
        path,
        "1,0,1,1,1,a,,0.5,train.py --lr 1",
        "2,0,1,1,1,a,,,train.py --lr 2",
        "3,0,1,1,1,a,,,",
        header=f"{HEADER},utilization,command",
    ).jobs

    assert first.command is not None and second.command is not None
    assert first.command.similar_key == second.command.similar_key
    assert first.command.exact_key != second.command.exact_key
    assert (none.command, first.utilization, second.utilization) == (None, 0.5, None)


def test_a_compressed_trace_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(f"\ufeff{HEADER}\r\n1,0,1,1,1,a,\r\n\r\n".encode()))

    assert len(read_trace(path).jobs) == 1


@pytest.mark.parametrize(
    ("cells", "about"),
    [
        ("1,x,60,1,1024,a,", "submit_s"),
        ("1,1700000000000,60,1,1024,a,", "submit_s"),
        ("1,0,nan,1,1024,a,", "duration_s"),
        ("1,0,,1,1024,a,", "duration_s"),
        ("1,0,60,1.5,1024,a,", "gpus"),
        ("1,0,60,0,1024,a,", "gpus"),
        ("1,0,60,1,24G,a,", "memory_mib"),
        (",0,60,1,1024,a,", "job"),
        ("1,0,60,1,1024,a,0", "time_limit_s"),
        ("1,0,60,1,1024,a", "6 values"),
        ("1,0,60,1,1024,a,,9", "8 values"),
    ],
)
def test_a_wrong_value_is_refused_with_its_line_and_column(
    path: Path, cells: str, about: str
) -> None:
    error = refused(path, "0,0,60,1,1024,a,", cells)

    assert mentions(error.message, "line 3", about)


def test_a_job_that_occurs_twice_is_refused_with_both_lines(path: Path) -> None:
    error = refused(path, "7,0,60,1,1024,a,", "8,0,60,1,1024,a,", "7,0,60,1,1024,a,")

    assert mentions(error.message, "line 4", "line 2", "'7'")


@pytest.mark.parametrize(
    ("header", "about"),
    [
        ("", "job"),
        ("job,submit_s", "duration_s, gpus, memory_mib, user, time_limit_s"),
        (f"{HEADER},user", "user"),
    ],
)
def test_a_header_without_a_column_is_refused(path: Path, header: str, about: str) -> None:
    assert mentions(refused(path, "1,0,60,1,1024,a,", header=header).message, about)


# Without the time: it would be in the names of tests, and pytest-xdist compares those of workers.
WHOLE = gzip.compress(HEADER.encode() * 100, mtime=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("no CSV.csv", b"\xff\xfe\x00"),
        ("no CSV.csv", b'job,"'),
        ("damaged.csv.gz", WHOLE[:12] + b"\xff" * 20 + WHOLE[32:]),
        ("not compressed.csv.gz", HEADER.encode()),
        ("missing.csv", None),
        (".", None),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_its_name(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadValue, match="cannot read") as refused:
        read_trace(path)
    assert mentions(refused.value.message, str(path))


@given(some.text(max_size=300))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(f"{HEADER}\n{text}".encode("utf-8", "surrogatepass"))
    try:
        read_trace(path)
    except BadValue as error:
        assert str(path) in error.message


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("6x8x24G", [Server(8, 24 * GIB)] * 6),
        ("2x24G", [Server(2, 24 * GIB)]),
        ("1x2x24G, 2x4x80GiB", [Server(2, 24 * GIB), *[Server(4, 80 * GIB)] * 2]),
    ],
)
def test_servers_are_described_by_count_gpus_and_size(text: str, servers: list[Server]) -> None:
    assert parse_servers(text) == tuple(servers)


OTHERS = (
    " 24G 8 2x x24G 0x24G 2x0x24G 2x24 1x2x3x4G 2x24G, 2*24G 99999x8x24G 2x-1G 1x9999999x24G 2x0G"
)


@pytest.mark.parametrize("text", OTHERS.split(" "))
def test_other_servers_are_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_servers(text)


def test_a_job_that_fits_on_no_server_is_refused_by_its_name(path: Path) -> None:
    trace = read(path, "small,0,1,1,1024,a,", "wide,0,1,3,1024,a,", "big,0,1,1,99999,a,")
    jobs = too_large(trace, parse_servers("2x24G,1x1x40G"))

    with pytest.raises(BadValue) as error:
        refuse_too_large(trace, jobs)

    assert mentions(error.value.message, "wide", "1 more")
    assert [trace.names[job.id] for job in trace.without(jobs).jobs] == ["small"]


def test_runs_are_written_with_the_names_of_the_jobs(path: Path, tmp_path: Path) -> None:
    trace = read(path, '"a,b",0,60,2,1024,alice,')
    out = tmp_path / "starts.csv"

    write_runs(out, [Run(trace.jobs[0], 0.5, 60.25, 1, (0, 3))], trace)

    assert out.read_text() == 'job,start_s,end_s,server,gpus\n"a,b",0.5,60.25,1,0;3\n'


def test_a_result_that_cannot_be_written_is_refused(path: Path, tmp_path: Path) -> None:
    trace = read(path, "1,0,60,1,1024,a,")
    with pytest.raises(BadValue, match="cannot write"):
        write_runs(tmp_path / "no" / "starts.csv", [], trace)
