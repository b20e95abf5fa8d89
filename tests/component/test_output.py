"""The kept output of a job, read from files that its shim goes on writing."""

import asyncio
import json
from pathlib import Path

from gpulease.server.output import OutputQuery, frames_of
from gpulease.wire.frames import FrameKind, FrameReader, frame

LIMIT = 1 << 30


def test_the_position_is_that_in_the_file_also_after_a_tail_and_a_gap(tmp_path: Path) -> None:
    (tmp_path / "stdout").write_bytes(b"one\ntwo\nthree\n")
    begin = {FrameKind.STDOUT: 0, FrameKind.STDERR: 0}

    async def read(query: OutputQuery, limit: int) -> list[tuple[FrameKind, bytes]]:
        pieces = [each async for each in frames_of(tmp_path, query, limit, lambda: True)]
        return list(FrameReader().feed(b"".join(pieces)))

    def position(kind: FrameKind, at: int) -> tuple[FrameKind, bytes]:
        return FrameKind.POSITION, json.dumps({"kind": kind, "at": at}).encode()

    assert asyncio.run(read(OutputQuery(begin, tail=1, positions=True), LIMIT)) == [
        position(FrameKind.STDOUT, 8), position(FrameKind.STDERR, 0),
        (FrameKind.STDOUT, b"three\n"), position(FrameKind.STDOUT, 14),
    ]  # fmt: skip
    late = OutputQuery({FrameKind.STDOUT: 2}, follow=True, positions=True)
    assert asyncio.run(read(late, 6)) == [
        position(FrameKind.STDOUT, 2),
        (FrameKind.STDERR, b"[gpulease: 6 bytes are no longer kept]\n"),
        (FrameKind.STDOUT, b"three\n"), position(FrameKind.STDOUT, 14),
    ]  # fmt: skip


def test_output_that_is_not_followed_ends_though_the_job_writes_faster_than_it_is_read(
    tmp_path: Path,
) -> None:
    log = tmp_path / "stdout"
    log.write_bytes(b"first\n" * 20_000)
    (tmp_path / "stderr").touch()
    kept = log.stat().st_size
    begin = {FrameKind.STDOUT: 0, FrameKind.STDERR: 0}

    async def read(tail: int | None) -> list[bytes]:
        read = []
        query = OutputQuery(begin, tail=tail)
        async for piece in frames_of(tmp_path, query, LIMIT, lambda: False):
            read.append(piece)
            with log.open("ab") as file:
                file.write(b"later\n" * 20_000)
            assert len(read) < 10, "it reads what was written meanwhile"
        return read

    whole = asyncio.run(read(None))
    assert sum(map(len, whole)) - kept < 100 * len(whole)
    assert not any(b"later" in piece for piece in whole)
    assert asyncio.run(read(2)) == [frame(FrameKind.STDOUT, b"later\n" * 2)]
