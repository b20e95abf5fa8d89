"""The folder of an Executor: forked children, full disks, and functions that disturb it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemon_rig import PATIENCE_S, Daemon, alive, wait_for
from e2e.python_process import environment
from e2e.test_executor import SLEEP, run, start, told
from goldens import mentions

SMALL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))"


def test_calls_end_with_a_killed_caller_that_has_forked(daemon: Daemon, tmp_path: Path) -> None:
    with start(
        daemon, tmp_path, SLEEP,
        f"""\
        pool = gpulease.Executor("1G")
        future = pool.submit(sleep, {str(tmp_path / "pid")!r})
        if os.fork() == 0:
            try: pool.submit(sleep, "")
            except RuntimeError as error: tell(error)
            pool.shutdown()
            tell(os.getpid())
            time.sleep(600)
        input()
        """,
    ) as process:  # fmt: skip
        assert mentions(told(process), "parent")
        child = int(told(process))
        wait_for("the call runs", (tmp_path / "pid").exists)
        process.kill()
        process.wait()
        try:
            assert daemon.wait_until(1, "ended")["exit_status"] != 0
            assert alive([child])
        finally:
            os.kill(child, 9)


def test_what_does_not_fit_fails_alone_and_leaves_no_file(daemon: Daemon, tmp_path: Path) -> None:
    shown = run(
        daemon, tmp_path, SMALL,
        """\
        with gpulease.Executor("1G") as pool:
            try: pool.submit(len, bytes(2 << 20))
            except GpuleaseError as error: tell(type(error).__name__, error, error.hint)
            tell([name for name in os.listdir(pool._files.folder) if name != "events"])
            tell(pool.submit(bytes, 2 << 20).exception())
            tell(pool.submit(len, "abc").result())
        """,
    )  # fmt: skip
    refused, left, lost, works = shown.splitlines()
    assert refused.startswith("GpuleaseError") and mentions(refused, str(tmp_path), "TMPDIR")
    assert (left, works) == ("[]", "3")
    assert mentions(lost, "job 1", str(tmp_path), "TMPDIR")


def test_a_function_may_fork_and_close_all_files(daemon: Daemon, tmp_path: Path) -> None:
    shown = run(
        daemon, tmp_path,
        """\
        def fork(fails):
            if (pid := os.fork()) == 0:
                return sys.exit(3) if fails else "child"
            return os.waitpid(pid, 0)[1] >> 8
        def close():
            os.closerange(3, 64)
            return "closed"
        """,
        """\
        with gpulease.Executor("1G") as pool:
            calls = (fork, False), (fork, True), (close,)
            tell([future.result() for future in [pool.submit(*call) for call in calls]])
        """,
    )  # fmt: skip
    assert shown == "[0, 3, 'closed']\n"


@pytest.mark.parametrize("mode", [0o777, None])
def test_a_folder_that_cannot_be_used_is_refused(
    daemon: Daemon, tmp_path: Path, mode: int | None
) -> None:
    folder = tmp_path / "shared"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    code = (
        "import gpulease, tempfile, gpulease.errors; tempfile.tempdir = __import__('sys').argv[1]\n"
        "try: gpulease.Executor('1G')\n"
        "except gpulease.errors.GpuleaseError as error: print(error.text())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment(daemon),
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert mentions(ran.stdout, str(folder), "TMPDIR")
