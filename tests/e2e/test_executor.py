"""`gpulease.Executor` in real scripts, against a real daemon on simulated GPUs."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from daemon_rig import PATIENCE_S, Daemon, alive, wait_for
from e2e.python_process import environment
from goldens import mentions

G = 1024**3
START = """\
import os, sys, time, concurrent.futures, gpulease
from gpulease.errors import *
def tell(*words): print(*words, flush=True)
"""


def script(folder: Path, functions: str, body: str) -> list[str]:
    """Write a script as users of multiprocessing do: functions, and a body that is guarded."""
    guarded = "if __name__ == '__main__':\n" + "".join(
        f"    {line}\n" for line in dedent(body).splitlines()
    )
    path = folder / "sweep.py"
    path.write_text(f"{START}{dedent(functions)}\n{guarded}")
    return [sys.executable, str(path)]


def run(daemon: Daemon, folder: Path, functions: str, body: str, **more: str) -> str:
    """Run a script to its end, and return what it told."""
    ran = subprocess.run(
        script(folder, functions, body), env=environment(daemon, TMPDIR=str(folder), **more),
        capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert not list(folder.glob("gpulease-executor-*")), "it removes its files"
    return ran.stdout


@contextmanager
def start(
    daemon: Daemon, folder: Path, functions: str, body: str
) -> "Iterator[subprocess.Popen[str]]":
    """Start a script, and kill it at the end of the block if it still runs."""
    process = subprocess.Popen(
        script(folder, functions, body), env=environment(daemon, TMPDIR=str(folder)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


WORK = """\
def work(path):
    while not os.path.exists(path): time.sleep(0.01)
    return 7
"""
SLEEP = """\
def sleep(path):
    print("asleep", flush=True)
    open(path, "w").write(str(os.getpid()))
    time.sleep(600)
"""


def test_each_call_is_a_job_with_its_own_lease(daemon: Daemon, tmp_path: Path) -> None:
    shown = run(
        daemon, tmp_path,
        """\
        def train(rate, *, steps):
            print("trains", rate)
            return rate * steps, os.getpid(), os.environ["GPULEASE_JOB"], os.getcwd()
        """,
        """\
        with gpulease.Executor("3G", gpus=2, time_limit="1h") as pool:
            futures = [pool.submit(train, rate, steps=2) for rate in (1, 2)]
            values = [future.result() for future in futures]
        tell(values[0][0], values[1][0], len({os.getpid(), *(it[1] for it in values)}))
        tell(values[0][3] == os.getcwd(), gpulease.Client().job(int(values[0][2])).name)
        """,
    )  # fmt: skip
    assert shown == "2 4 3\nTrue train\n"
    first, second = daemon.jobs()
    for job in (first, second):
        assert (job["state"], job["outcome"], job["exit_status"]) == ("ended", "exited", 0)
        assert [lease["memory"] for lease in job["leases"]] == [3 * G, 3 * G]
        assert (job["kind"], job["name"], job["claim"]["time_limit"]) == ("run", "train", 3600)
    assert daemon.run("logs", "1").stdout == "trains 1\n"


def test_an_exception_arrives_with_the_traceback_of_its_job(daemon: Daemon, tmp_path: Path) -> None:
    shown = run(
        daemon, tmp_path,
        """\
        class Diverged(ValueError): pass
        class Odd(Exception):
            def __init__(self, one, two): super().__init__("odd")
        def train(kind):
            if kind == "lambda": return lambda: 1
            if kind == "exit": sys.exit(3)
            raise Odd(1, 2) if kind == "odd" else Diverged("at step 7")
        """,
        """\
        with gpulease.Executor("1G") as pool:
            futures = [pool.submit(train, kind) for kind in ("", "odd", "lambda", "exit")]
        error = futures[0].exception()
        tell(type(error) is Diverged, error, "in train" in str(error.__cause__))
        for future in futures[1:]:
            tell(type(future.exception()).__name__, future.exception().job, future.exception())
        """,
    )  # fmt: skip
    first, odd, unpicklable, left = shown.splitlines()
    assert first == "True at step 7 True"
    assert odd.startswith("CallFailed 2") and mentions(odd, "Odd: odd")
    assert unpicklable.startswith("CallFailed 3") and mentions(unpicklable, "pickle")
    assert left.startswith("CallFailed 4") and mentions(left, "SystemExit(3)")
    assert [job["exit_status"] for job in daemon.jobs()] == [1, 1, 0, 1]
    assert "Diverged: at step 7" in daemon.run("logs", "1").stderr


def test_a_worker_that_is_killed_fails_its_call_alone(daemon: Daemon, tmp_path: Path) -> None:
    shown = run(
        daemon, tmp_path,
        "def work(dies): os.kill(os.getpid(), 9) if dies else None; return 7",
        """\
        with gpulease.Executor("1G") as pool:
            futures = [pool.submit(work, dies) for dies in (True, False)]
        error = futures[0].exception()
        tell(type(error).__name__, error.job, error.hint)
        tell(futures[1].result())
        """,
    )  # fmt: skip
    killed, other = shown.splitlines()
    assert killed.startswith("CallFailed 1") and mentions(killed, "gpulease logs 1")
    assert other == "7"


def test_a_queued_call_can_be_cancelled_and_a_running_one_cannot(
    daemon: Daemon, tmp_path: Path
) -> None:
    with start(
        daemon, tmp_path, SLEEP,
        f"""\
        pool = gpulease.Executor("8G", gpus=2)
        running, queued = (pool.submit(sleep, {str(tmp_path / "pid")!r}) for _ in range(2))
        while not running.running(): time.sleep(0.01)
        tell(running.cancel(), queued.running(), queued.cancel())
        done, _ = concurrent.futures.wait([queued])
        tell(queued.cancelled(), gpulease.Client().job(2).outcome)
        input()
        tell(repr(running.exception()))
        pool.shutdown()
        """,
    ) as process:  # fmt: skip
        assert told(process) == "False False True"
        assert told(process) == "True cancelled"
        daemon.cancel(1)
        output, errors = process.communicate("\n", timeout=PATIENCE_S)
        assert mentions(output, "CallFailed", "job 1", "cancelled"), (output, errors)


def test_ctrl_c_in_the_block_ends_every_call(daemon: Daemon, tmp_path: Path) -> None:
    with start(
        daemon, tmp_path, SLEEP,
        f"""\
        with gpulease.Executor("8G") as pool:
            futures = [pool.submit(sleep, {str(tmp_path)!r} + f"/{{n}}") for n in range(5)]
            while sum(future.running() for future in futures) < 2: time.sleep(0.01)
            tell("ready")
            futures[0].result()
        """,
    ) as process:  # fmt: skip
        assert told(process) == "ready"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert "KeyboardInterrupt" in errors
        assert {job["outcome"] for job in daemon.jobs()} == {"cancelled"}
        assert not list(tmp_path.glob("gpulease-executor-*"))


def test_calls_end_with_the_process_that_waits_for_them(daemon: Daemon, tmp_path: Path) -> None:
    with start(
        daemon, tmp_path, SLEEP,
        f"""\
        pool = gpulease.Executor("8G", gpus=2)
        futures = [pool.submit(sleep, {str(tmp_path / "pid")!r}) for _ in range(3)]
        while not futures[0].running(): time.sleep(0.01)
        tell("ready")
        input()
        """,
    ) as process:  # fmt: skip
        assert told(process) == "ready"
        wait_for("the call runs", (tmp_path / "pid").exists)
        pid = int(wait_for("the call says so", (tmp_path / "pid").read_text))
        wait_for("all are queued", lambda: len(daemon.jobs()) == 3)
        process.kill()
        process.wait()
        for number in (1, 2, 3):
            assert daemon.wait_until(number, "ended")["exit_status"] != 0
        assert not alive([pid])
        assert not list(tmp_path.glob("gpulease-executor-*"))


def test_a_restart_of_the_daemon_changes_nothing(daemon: Daemon, tmp_path: Path) -> None:
    with start(
        daemon, tmp_path, WORK,
        f"""\
        with gpulease.Executor("8G", gpus=2, max_workers=2) as pool:
            futures = [pool.submit(work, {str(tmp_path / "go")!r}) for _ in range(3)]
            while not futures[0].running(): time.sleep(0.01)
            tell("ready")
            tell([future.result() for future in futures])
        """,
    ) as process:  # fmt: skip
        assert told(process) == "ready"
        daemon.kill()
        (tmp_path / "go").touch()
        daemon.start()
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert output == "[7, 7, 7]\n", errors


def test_a_claim_that_can_never_be_granted_is_the_exception_of_the_call(
    daemon: Daemon, tmp_path: Path
) -> None:
    shown = run(
        daemon, tmp_path, "",
        """\
        with gpulease.Executor("80G") as pool:
            tell(type(pool.submit(os.getpid).exception()).__name__)
        try:
            pool.submit(os.getpid)
        except RuntimeError as error:
            tell(error)
        """,
    )  # fmt: skip
    assert shown == "CannotLease\ncannot submit to an executor after its shutdown\n"


def test_the_rest_of_the_queue_is_dropped_at_a_shutdown_that_asks_for_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    shown = run(
        daemon, tmp_path, WORK,
        f"""\
        pool = gpulease.Executor("8G", gpus=2)
        go = {str(tmp_path / "go")!r}
        futures = [pool.submit(work, go) for _ in range(30)]
        while not futures[0].running(): time.sleep(0.01)
        pool.shutdown(wait=False, cancel_futures=True)
        concurrent.futures.wait(futures[1:])
        open(go, "w").close()
        pool.shutdown()
        tell(futures[0].result(), sum(future.cancelled() for future in futures))
        """,
    )  # fmt: skip
    assert shown == "7 29\n"


def test_within_a_lease_it_is_refused_unless_a_new_lease_is_asked_for(
    daemon: Daemon, tmp_path: Path
) -> None:
    shown = run(
        daemon, tmp_path, "",
        """\
        with gpulease.lease("1G"):
            try:
                gpulease.Executor("1G")
            except AlreadyLeased as error:
                tell(error.text())
            with gpulease.Executor("1G", new_lease=True) as pool:
                tell(pool.submit(os.getenv, "GPULEASE_JOB").result())
        """,
    )  # fmt: skip
    assert mentions(shown, "job 1", "new_lease=True")
    assert shown.splitlines()[-1] == "2"


def test_a_call_that_runs_out_of_memory_is_made_again_with_more(
    daemon: Daemon, tmp_path: Path
) -> None:
    shown = run(
        daemon, tmp_path,
        """\
        def train():
            if int(os.environ["GPULEASE_MEMORY"]) < 2**31:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return "fits"
        """,
        """\
        with gpulease.Executor("1G", retry_oom=2) as pool:
            tell(pool.submit(train).result())
        """,
    )  # fmt: skip
    assert shown == "fits\n"
    assert [job["out_of_memory"] for job in daemon.jobs()] == [True, False]


def test_a_call_that_raised_is_made_again(daemon: Daemon, tmp_path: Path) -> None:
    shown = run(
        daemon, tmp_path,
        """\
        def train():
            tried = os.path.join(os.environ["TMPDIR"], "tried")
            if not os.path.exists(tried):
                open(tried, "w").close()
                raise RuntimeError("the license server does not answer")
            return "done"
        """,
        """\
        with gpulease.Executor("1G", retries=1, retry_delay=0) as pool:
            tell(pool.submit(train).result())
        """,
    )  # fmt: skip
    assert shown == "done\n"
    assert [job["queue"]["retried"] for job in daemon.jobs()] == [0, 1]


def test_what_cannot_be_pickled_is_refused_where_it_is_submitted(
    daemon: Daemon, tmp_path: Path
) -> None:
    shown = run(
        daemon, tmp_path, "",
        """\
        sys.modules["cloudpickle"] = None
        with gpulease.Executor("1G") as pool:
            try:
                pool.submit(lambda: 1)
            except BadValue as error:
                tell(error.hint)
        """,
    )  # fmt: skip
    assert mentions(shown, "cloudpickle")


def test_a_script_without_a_guard_is_refused_where_its_job_imports_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = tmp_path / "sweep.py"
    path.write_text(
        START + "def work(): return 7\n"
        "with gpulease.Executor('1G') as pool: tell(pool.submit(work).exception().text())"
    )
    ran = subprocess.run(
        [sys.executable, str(path)], env=environment(daemon, TMPDIR=str(tmp_path)),
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert mentions(ran.stdout, "job 1", '__name__ == "__main__"')
