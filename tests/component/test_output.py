"""The kept output of a job, read from files that its shim goes on writing."""

import asyncio
from pathlib import Path

from gpulease.server.output import OutputQuery, frames_of
from gpulease.wire.frames import FrameKind, frame

LIMIT = 1 << 30


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
