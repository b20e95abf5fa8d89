"""`gpulease.Executor` beside the packages of sweeps: cloudpickle, joblib, hydra, submitit."""

from pathlib import Path
from textwrap import dedent

import pytest

from daemon_rig import Daemon
from frameworks.test_notebooks import User, daemon, python, user

__all__ = ["daemon", "python", "user"]


def run(user: User, script: str, *words: str) -> str:
    """Run a script that is a file, as users have it."""
    (user.folder / "sweep.py").write_text(dedent(script))
    return user.run(f"import runpy; sys.argv = ['sweep.py', *{words!r}]\n"
                    "runpy.run_path('sweep.py', run_name='__main__')")  # fmt: skip


def test_with_cloudpickle_anything_can_be_called_from_anywhere(daemon: Daemon, user: User) -> None:
    shown = user.run(
        """\
        import gpulease
        factor = 3
        class Point:
            def __init__(self, x): self.x = x
        def scaled(point): return Point(point.x * factor)
        with gpulease.Executor("1G") as pool:
            tell(pool.submit(lambda x: x * factor, 2).result())
            point = pool.submit(scaled, Point(5)).result()
            tell(type(point) is Point, point.x)
        """
    )
    assert shown == "6\nTrue 15\n"
    assert [job["name"] for job in daemon.jobs()] == ["<lambda>", "scaled"]


def test_the_functions_of_a_notebook_can_be_called(daemon: Daemon, user: User) -> None:
    shown = user.run(
        """\
        manager, client = kernel("python3")
        printed(client, "import gpulease\\ndef train(rate): return rate * 2")
        tell(printed(client, "with gpulease.Executor('1G') as pool:\\n"
                             "    print(list(pool.map(train, [1, 2])))"))
        client.stop_channels()
        manager.shutdown_kernel()
        """
    )
    assert shown == "[2, 4]\n"


def test_joblib_calls_through_threads(daemon: Daemon, user: User) -> None:
    shown = run(
        user,
        """\
        import gpulease
        from joblib import Parallel, delayed

        def train(rate):
            return rate * 2

        with gpulease.Executor("1G") as pool:
            def job(rate):
                return pool.submit(train, rate).result()
            print(Parallel(n_jobs=4, prefer="threads")(delayed(job)(rate) for rate in range(6)))
        """,
    )
    assert shown == "[0, 2, 4, 6, 8, 10]\n"
    assert [job["name"] for job in daemon.jobs()] == ["train"] * 6


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_hydra_runs_its_jobs_in_leases(daemon: Daemon, user: User, launcher: str) -> None:
    shown = run(
        user,
        """\
        import gpulease
        import hydra
        import os

        def train(rate):
            return int(os.environ["GPULEASE_JOB"]), rate * 2

        @hydra.main(version_base=None, config_path=None)
        def main(config):
            with gpulease.Executor("1G") as pool:
                job, result = pool.submit(train, config.rate).result()
            with open("result.txt", "w") as file:
                file.write(f"{result}")

        if __name__ == "__main__":
            main()
        """,
        "--multirun", "+rate=1,2", f"hydra/launcher={launcher}",
        f"hydra.sweep.dir={user.folder}/out", "hydra.job.chdir=true",
    )  # fmt: skip
    results = [(Path(user.folder) / "out" / str(number) / "result.txt") for number in (0, 1)]
    assert [path.read_text() for path in results] == ["2", "4"], shown
    assert [job["outcome"] for job in daemon.jobs()] == ["exited", "exited"]


def test_code_for_the_executors_of_submitit_runs_with_ours(daemon: Daemon, user: User) -> None:
    shown = run(
        user,
        """\
        import gpulease
        import submitit

        def train(rate):
            return rate * 2

        def sweep(executor):
            jobs = [executor.submit(train, rate) for rate in (1, 2)]
            return [job.result() for job in jobs]

        local = submitit.LocalExecutor(folder="log")
        with gpulease.Executor("1G") as pool:
            print(sweep(local) == sweep(pool) == [2, 4])
        """,
    )
    assert shown == "True\n"
