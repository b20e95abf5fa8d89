"""The logs: bounded, and never in the way of the job, whatever the disk does."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.shim.record import read_record
from gpulease.wire.frames import FrameKind
from process_rig import (
    Client,
    end,
    finish,
    job_directory,
    launch_of,
    python,
    shell,
    start,
    wait_until,
)

MIB = 1 << 20


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A job's directory on a file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    with job_directory() as made:
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=711", "none", str(made)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("this machine does not let root mount a tmpfs")
        try:
            yield made
        finally:
            subprocess.run(["umount", "--lazy", str(made)], check=True)


def test_a_log_keeps_its_newest_part(directory: Path) -> None:
    limit = 256 << 10
    finish(shell(directory, "seq 1000000", log_limit=limit))

    log = directory / "stdout"
    text = log.read_bytes()
    everything = b"".join(b"%d\n" % number for number in range(1, 1_000_001))
    assert len(text) == len(everything)
    assert text[-limit:] == everything[-limit:]
    assert log.stat().st_blocks * 512 < 2 * limit


def test_a_job_on_a_full_disk_runs_to_its_recorded_end(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (180 << 10))

    ended = finish(shell(small_disk, f"head -c {4 * MIB} /dev/zero; echo err >&2; exit 7"))

    assert ended.exit_code == 7
    record = read_record(small_disk)
    assert record is not None and record.exited == ended


def test_a_log_says_what_it_had_to_drop(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (180 << 10))
    program = f"""
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
sys.stdout.write("x" * {MIB})
sys.stdout.flush()
print("full", file=sys.stderr, flush=True)
signal.sigwait({{signal.SIGUSR1}})
print("after", flush=True)
"""
    started = start(python(small_disk, program, awaits_attach=True))
    with Client(small_disk, "attach") as client:
        client.until(FrameKind.STDERR)
        filler.unlink()
        os.kill(started.pid, signal.SIGUSR1)
        client.until(FrameKind.EXITED)

    lines = (small_disk / "stdout").read_text().splitlines()
    kept = len(lines[0])
    assert 0 < kept < 256 << 10
    assert lines[1:] == [
        f"[gpulease: {MIB - kept} bytes of output were dropped: No space left on device]",
        "after",
    ]


def test_a_disk_with_no_room_for_a_record_launches_nothing(small_disk: Path) -> None:
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(b"x" * (512 << 10))

    with pytest.raises(Exception, match="No space left on device"):
        start(launch_of(small_disk, "true"))

    assert read_record(small_disk) is None


def test_logs_are_private_to_whom_the_daemon_runs_as(directory: Path) -> None:
    finish(shell(directory, "echo secret", umask=0))

    for name in ("stdout", "stderr", "record", "socket"):
        found = (directory / name).stat()
        assert (found.st_mode & 0o777, found.st_uid) == (0o600, os.geteuid())


def test_output_that_a_stranger_to_the_tree_goes_on_writing_does_not_hold_up_the_end(
    directory: Path,
) -> None:
    started = start(shell(directory, "echo up; exec sleep 1000"))
    wait_until((directory / "stdout").read_text)
    held = os.open(f"/proc/{started.pid}/fd/1", os.O_WRONLY)
    try:
        os.kill(started.pid, signal.SIGKILL)
        assert end(directory).signal == signal.SIGKILL
    finally:
        os.close(held)
