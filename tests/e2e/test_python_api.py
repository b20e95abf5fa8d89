"""`gpulease.lease` in real processes, against a real daemon on simulated GPUs."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from daemon_rig import PATIENCE_S, Daemon, wait_for
from e2e.python_process import PLAIN, Process, refusal, run, source
from goldens import mentions
from gpulease.config import personal_state
from gpulease.user_daemon import serving

G = 1024**3


def test_the_process_has_the_lease_for_as_long_as_the_block(daemon: Daemon) -> None:
    process = Process(
        daemon,
        """\
        with gpulease.lease("3G", gpus=2, name="nb") as lease:
            tell(lease.id, lease.memory, *(gpu.uuid for gpu in lease.gpus))
            tell(os.environ["CUDA_VISIBLE_DEVICES"], lease.environment["GPULEASE_JOB"])
            input()
        tell(lease, lease.held)
        input()
        """,
    )
    number, memory, *uuids = process.told().split()
    visible, in_environment = process.told().split()

    job = daemon.job(int(number))
    assert (job["state"], job["kind"], job["name"]) == ("active", "hold", "nb")
    assert job["pid"] == process.pid
    assert [lease["gpu"] for lease in job["leases"]] == uuids == visible.split(",")
    assert int(memory) == 3 * G
    assert in_environment == number

    process.go_on()
    shown = process.told()
    assert mentions(shown, f"<gpulease.Lease {number}: 3G", "2 GPUs") and shown.endswith("> False")
    assert daemon.wait_until(int(number), "ended")["outcome"] == "released"
    assert process.end() == ("", "")


def test_release_leaves_nothing_behind(daemon: Daemon) -> None:
    run(
        daemon,
        """\
        def state():
            return dict(os.environ), type(os.environ), sys.path[:], sys.meta_path[:]
        before = state()
        for _ in range(2):
            lease = gpulease.lease("1G")
            assert os.environ["GPULEASE_MEMORY"] == str(2**30)
            assert sys.path == before[2]
            lease.release()
            lease.release()
            assert state() == before
        """,
    )


def test_what_the_caller_had_set_comes_back(daemon: Daemon) -> None:
    theirs = {"CUDA_VISIBLE_DEVICES": "7", "TF_FORCE_UNIFIED_MEMORY": "1", "PYTHONPATH": "/mine"}
    run(
        daemon,
        f"""\
        theirs = {theirs}
        with gpulease.lease("1G") as lease:
            assert os.environ["CUDA_VISIBLE_DEVICES"] == lease.gpus[0].uuid
            assert "TF_FORCE_UNIFIED_MEMORY" not in os.environ
            assert os.environ["PYTHONPATH"].endswith(":/mine")
        assert {{name: os.environ[name] for name in theirs}} == theirs
        """,
        **theirs,
    )


def test_what_the_block_writes_stays_inside_the_lease(daemon: Daemon) -> None:
    run(
        daemon,
        """\
        with gpulease.lease("1G", gpus=2) as lease:
            os.environ["CUDA_VISIBLE_DEVICES"] = "1"
            assert os.environ["CUDA_VISIBLE_DEVICES"] == lease.gpus[1].uuid
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        """,
    )


def test_children_are_inside_the_lease(daemon: Daemon) -> None:
    told = run(
        daemon,
        """\
        import subprocess
        child = "import os, sys; print(os.environ['GPULEASE_JOB'], type(sys.meta_path[0]))"
        with gpulease.lease("1G"):
            subprocess.run([sys.executable, "-c", child], check=True)
        """,
    )
    assert told.startswith("1 <class 'sitecustomize.GpuleaseFinder'>")


def test_an_exception_in_the_block_gives_the_lease_back_and_is_not_hidden(daemon: Daemon) -> None:
    told = run(
        daemon,
        """\
        try:
            with gpulease.lease("1G") as lease:
                raise ZeroDivisionError("mine")
        except ZeroDivisionError as error:
            tell(error, gpulease.Client().job(lease.id).outcome)
        """,
    )
    assert told == "mine released\n"


def test_a_lease_lasts_though_nobody_keeps_the_object(daemon: Daemon) -> None:
    process = Process(
        daemon, 'import gc\ngpulease.lease("1G")\ngc.collect()\ntell("there")\ninput()'
    )
    assert process.told() == "there"
    assert daemon.job(1)["state"] == "active"
    process.end()
    assert daemon.wait_until(1, "ended")["outcome"] == "released"


def test_a_forked_child_has_the_lease_and_cannot_release_it(daemon: Daemon) -> None:
    told = run(
        daemon,
        """\
        with gpulease.lease("1G") as lease:
            child = os.fork()
            if child == 0:
                lease.release()
                os._exit(7 if gpulease.lease("1G").id == lease.id else 1)
            tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            tell(gpulease.Client().job(lease.id).state)
        """,
    )
    assert told.split() == ["7", "active"]


def test_a_second_lease_in_a_process_is_refused(daemon: Daemon) -> None:
    told = run(daemon, 'lease = gpulease.lease("1G")' + refusal("AlreadyLeased"))
    assert re.match(".*job 1\n\nhint: ", told)


def inside_a_job(daemon: Daemon, script: str, *line: str) -> str:
    """Return what a script of Python says that runs in a job of 2G."""
    reached = os.environ | {"GPULEASE_SOCKET": str(daemon.socket)}
    return daemon.run("run", "--mem", "2G", "--", *line, *source(script), env=reached).stdout


def test_a_lease_inside_a_job_is_the_lease_of_the_job(daemon: Daemon) -> None:
    told = inside_a_job(
        daemon,
        """\
        with gpulease.lease("1G", name="mine", wait=0) as lease:
            print(lease.id, lease.memory, lease.held, os.environ["GPULEASE_MEMORY"])
            print(lease.environment["GPULEASE_JOB"], len(lease.gpus))
        print(gpulease.Client().job(lease.id).state, os.environ["GPULEASE_JOB"])
        with gpulease.lease() as again:
            print(again.id)
        """,
    )
    assert told.split() == ["1", str(2 * G), "True", str(2 * G), "1", "1", "active", "1", "1"]
    listed = daemon.jobs()
    assert [job["id"] for job in listed] == [1]


def test_a_lease_inside_a_job_that_is_too_small_is_refused(daemon: Daemon) -> None:
    told = inside_a_job(
        daemon,
        """\
        for asked in ({"memory": "3G"}, {"gpus": 2}, {"time_limit": "1h"}, {"split": 2}):
            try:
                gpulease.lease(**asked)
            except AlreadyLeased as error:
                print(error.message, "|", error.hint)
        """,
    )
    sizes, gpus, time, split = told.splitlines()
    assert re.search("job 1.*2G.* [|] .*2G.*gpulease run --mem SIZE", sizes)
    assert mentions(gpus, "1 GPU", "2")
    assert "time limit" in time
    assert mentions(split, "job 1 ", "1", "2", " | ")


def test_a_lease_inside_a_job_is_put_into_force_where_the_environment_was_cleared(
    daemon: Daemon,
) -> None:
    told = inside_a_job(
        daemon,
        """\
        print("GPULEASE_JOB" in os.environ)
        with gpulease.lease("1G") as lease:
            print(lease.id, lease.memory, os.environ["GPULEASE_MEMORY"])
        print("GPULEASE_JOB" in os.environ, gpulease.Client().job(lease.id).state)
        """,
        "env", "-i", f"GPULEASE_SOCKET={daemon.socket}",
    )  # fmt: skip
    assert told.split() == ["False", "1", str(G), str(G), "False", "active"]


def test_a_lease_that_was_given_back_cannot_be_entered(daemon: Daemon) -> None:
    told = run(
        daemon,
        'lease = gpulease.lease("1G")\nlease.release()'
        + refusal("GpuleaseError", "lease.__enter__()"),
    )
    assert "job 1" in told


@pytest.mark.parametrize(
    ("kind", "call", "said"),
    [
        ("CannotLease", "lease('30G')", "30G"),
        ("CannotLease", "lease('1G', gpus=3)", "3"),
        ("BadValue", "lease('much')", "'much'"),
        ("BadValue", "lease(4)", "4 bytes"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    daemon: Daemon, kind: str, call: str, said: str
) -> None:
    told = run(
        daemon,
        f"before = dict(os.environ){refusal(kind, 'gpulease.' + call)}"
        "assert os.environ == before\n"
        "gpulease.lease('1G').release()",
    )
    assert said in told


def test_where_no_daemon_answers_one_is_started(
    no_daemon_of_the_machine: None, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    mine = {
        "XDG_RUNTIME_DIR": str(folder),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "GPULEASE_SIMULATE": "1x4G",
    }
    ran = subprocess.run(
        source('with gpulease.lease("1G") as lease:\n    tell(lease.id)'),
        env=PLAIN | mine, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    started = serving(personal_state(mine))
    assert started is not None, ran.stderr
    os.kill(started.pid, signal.SIGTERM)
    wait_for("the daemon has left", lambda: not started.socket.exists())

    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr
    assert ran.stderr.startswith("gpulease: ") and ran.stderr.count("\n") == 1


def test_after_its_end_by_others_a_lease_is_not_held_and_another_can_be_had(
    daemon: Daemon,
) -> None:
    told = run(
        daemon,
        """\
        import time
        before = dict(os.environ)
        for limit in ("1s", None):
            lease = gpulease.lease("1G", time_limit=limit)
            assert lease.held
            if limit is None:
                gpulease.Client().cancel(lease.id)
            while lease.held:
                time.sleep(0.05)
        with gpulease.lease("2G") as lease:
            assert os.environ["GPULEASE_MEMORY"] == str(2 * 2**30)
        assert dict(os.environ) == before
        tell("done")
        """,
    )
    assert told == "done\n"
