"""What Slurm prints is read so that the names of jobs cannot look like other fields."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.errors import SlurmFailed
from gpulease.slurm.records import (
    Requested,
    parse_fixed,
    parse_record,
    placements,
    requested,
    stream_files,
)

WIDTHS = {"jobid": 6, "name": 12, "state": 10}


def printed(*jobs: tuple[str, str, str]) -> str:
    """Return what squeue prints, which cuts and pads in bytes."""
    rows = [
        b"".join(
            text.encode()[:width].ljust(width)
            for text, width in zip(job, WIDTHS.values(), strict=True)
        )
        for job in jobs
    ]
    return b"".join(row + b"\n" for row in rows).decode("utf-8", "surrogateescape")


@given(st.text(string.printable + "é\u2028\x85\x1c", max_size=20))
def test_no_name_leaves_its_field(name: str) -> None:
    first, second = parse_fixed(printed(("1", name, "PENDING"), ("2", "b", "RUNNING")), WIDTHS)
    assert (first["jobid"], first["state"]) == ("1", "PENDING")
    assert dict(second) == {"jobid": "2", "name": "b", "state": "RUNNING"}


def test_absent_fields_are_left_out() -> None:
    (job,) = parse_fixed(printed(("1", "(null)", "N/A")), WIDTHS)
    assert dict(job) == {"jobid": "1"}


def test_a_name_that_is_cut_within_a_character_is_read() -> None:
    (job,) = parse_fixed(printed(("1", "abcdefghijké", "RUNNING")), WIDTHS)
    assert job["name"].startswith("abcdefghijk")


def test_records_of_another_length_are_an_error() -> None:
    with pytest.raises(SlurmFailed, match="squeue"):
        list(parse_fixed("1 name RUNNING\n", WIDTHS))


def test_of_a_field_that_occurs_twice_the_first_counts() -> None:
    assert parse_record("State=IDLE Comment=a State=DOWN")["State"] == "IDLE"


SHOWN = """JobId=3 JobName={name}
   UserId=alice(47201) GroupId=alice(47201) MCS_label=N/A
   JOB_GRES=shard:40
     Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:40(IDX:1)
   Command=(null)
   WorkDir=/home/alice
   Comment={comment}
   StdErr=/home/alice/err
   StdIn=/dev/null
   StdOut=/home/alice/out file
   Power=
"""


def test_the_gpus_of_a_job_are_read_by_node() -> None:
    shown = SHOWN.format(name="a", comment="")
    assert placements(shown) == {"n1": "shard:40(IDX:1)"}
    newer = shown.replace("(IDX:1)", "(0/96,40/96)")
    assert newer != shown
    assert placements(newer) == placements(shown)


def test_a_forged_place_is_left_out() -> None:
    name = "x\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:1(IDX:0)"
    assert placements(SHOWN.format(name=name, comment="")) == {}


def test_a_comment_does_not_replace_the_files_of_the_output() -> None:
    shown = SHOWN.format(name="a", comment="\n   StdOut=/etc/shadow")
    assert stream_files(shown) == ("/home/alice/out file", "/home/alice/err")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gres:shard:16", Requested(shards=16)),
        ("gres/gpu:a100:2,gres/craynetwork:1", Requested(gpus=2)),
        ("cpu=2,gres/gpu=1", Requested(gpus=1)),
        ("gres:gpu:a100", Requested(gpus=1)),
        ("gpu:2(S:0-1),shard:192", Requested(gpus=2, shards=192)),
        ("gres:shard:1K", Requested(shards=1024)),
        ("gres:license:3", Requested()),
        (None, Requested()),
    ],
)
def test_generic_resources_are_read(text: str | None, expected: Requested) -> None:
    assert requested(text) == expected
