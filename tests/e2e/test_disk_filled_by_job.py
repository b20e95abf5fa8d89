"""A job fills the disk that the record is on: others submit all the same, and its end is stored."""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for
from e2e.users import OTHER, STRANGER, call, daemon_for_all, needs_root
from e2e.users import job as submission

from .asking import G, client, submit, when_in

MIB = 1 << 20
ENDS = "head -c 300000000 /dev/zero; exit 5"
RUNS = "exec cat /dev/zero"
# A full disk lets the mode of a file change, which says that it was full.
OWN_FILE = "cat /dev/zero > {disk}/own/file; chmod 400 {disk}/own/file; exec sleep 600"


@pytest.fixture
def ext4() -> Iterator[Path]:
    """Return a file system of 64 MiB that keeps no blocks for root; `own` in it is every user's."""
    if os.geteuid() != 0:
        pytest.skip("mounting a disk takes root")
    with tempfile.TemporaryDirectory(prefix="gpulease-disk-") as name:
        Path(name).chmod(0o711)
        image, disk = Path(name, "image"), Path(name, "disk")
        disk.mkdir()
        with image.open("wb") as file:
            file.truncate(64 * MIB)
        try:
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("needs mkfs.ext4")
        mount = ["mount", "-o", "loop", str(image), str(disk)]
        if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
            pytest.skip("this machine lets nobody mount a file")
        (disk / "state").mkdir()
        (disk / "own").mkdir()
        (disk / "own").chmod(0o1777)
        yield disk
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def on(disk: Path, daemon: Daemon) -> Daemon:
    daemon.state.symlink_to(disk / "state")
    return daemon


def submits(daemon: Daemon, uid: int) -> int | None:
    """Return the job that a user could submit, or None."""
    status, answer = call(daemon, uid, "POST", "/v1/jobs", submission("true", memory=G))
    return int(answer["id"]) if status == 201 else None


@needs_root
@pytest.mark.parametrize("script", [ENDS, RUNS, OWN_FILE], ids=["ends", "runs on", "own file"])
def test_others_submit_on_a_disk_that_a_users_job_fills(script: str, ext4: Path) -> None:
    # With a quarter of this disk for ended jobs, the log may be gone before it is read here.
    with daemon_for_all(ext4 / "state", most_output="64M") as daemon:
        wait_for("the reserve is laid", (ext4 / "state/gpulease.db.reserve").exists)
        wanted = submission("sh", "-c", script.format(disk=ext4), memory=G)
        filler = int(call(daemon, STRANGER, "POST", "/v1/jobs", wanted)[1]["id"])
        log = ext4 / f"state/jobs/{filler}/stdout"
        wait_for("it has filled the disk", lambda: has_filled(ext4, log))
        other = wait_for("another user submits", lambda: submits(daemon, OTHER))
        for _ in range(5):
            assert submits(daemon, OTHER) is not None
        assert when_in(daemon, other, "ended").exit_status == 0
        if script != ENDS:
            client(daemon).cancel(filler)
        ended = when_in(daemon, filler, "ended")
        assert ended.outcome == ("exited" if script == ENDS else "cancelled")
        assert script == OWN_FILE or "[gpulease: " in tail(log)
        assert "Traceback" not in daemon.log


def has_filled(disk: Path, log: Path) -> bool:
    """Tell whether more than the disk holds went through a log, or into a file of the user's.

    The free space says less: the daemon gives back its reserve as soon as the disk is full.
    """
    if (own := disk / "own/file").exists():
        return stat.S_IMODE(own.stat().st_mode) == 0o400
    return log.exists() and log.stat().st_size > 64 * MIB


def tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 64 * MIB // 2))
        return file.read().replace(b"\0", b"").decode()


def test_a_daemon_starts_on_a_disk_that_is_full_of_output(
    ext4: Path, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = on(ext4, make_daemon(settings={"grace": "1s"})).start()
    script = f"echo first; head -c {8 * MIB} /dev/zero; echo last"
    job = submit(daemon, "sh", "-c", script)
    when_in(daemon, job, "ended")
    daemon.kill()
    # What a shim of an older version does, which knows no bound but its own.
    log = ext4 / f"state/jobs/{job}/stdout"
    (ext4 / "state/gpulease.db.reserve").unlink(missing_ok=True)
    with log.open("r+b", buffering=0) as file, pytest.raises(OSError, match="No space"):
        file.seek(0, os.SEEK_END)
        while True:
            file.write(b"\0" * MIB)
    assert shutil.disk_usage(ext4).free < MIB
    daemon.start()
    assert when_in(daemon, submit(daemon, "sh", "-c", "exit 3"), "ended").exit_status == 3
    wait_for("the reserve is laid", (ext4 / "state/gpulease.db.reserve").exists)


def test_output_of_running_jobs_is_bounded_in_its_sum(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"grace": "1s", "most_running_output": "4M"}).start()
    script = f"echo first; yes | head -c {16 * MIB}; echo last; exec sleep 600"
    job = submit(daemon, "sh", "-c", script)
    log = daemon.state / f"jobs/{job}/stdout"
    wait_for("it has written", lambda: log.exists() and log.stat().st_size > 16 * MIB)
    wait_for("its log is shortened", lambda: log.stat().st_blocks * 512 <= 4 * MIB)
    said = daemon.run("logs", str(job))
    assert said.stdout.endswith("y\ny\nlast\n")
    assert "first" not in said.stdout
    assert "\0" not in said.stdout
    wait_for(
        "the owner is told", lambda: "most_running_output" in daemon.run("show", str(job)).stdout
    )
