"""The processes of a job in `gpulease top`, against a real daemon."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from top_rig import User, started, use

from daemon_rig import Daemon
from e2e.users import STRANGER, daemon_for_all, needs_root
from tmux_rig import TMUX, children, terminal

FAMILY = "sleep 601 & bash -c 'sleep 602 & wait' & wait"
EVIL = r"exec -a $'\e]0;owned\a\e[31mevil\e[2J' sleep 603"
BUSY = "while True: pass"


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("top"), settings={"grace": "1s"}).start()
    yield daemon
    daemon.end_all()


@pytest.fixture
def daemon(standing: Daemon) -> Iterator[Daemon]:
    """Return a daemon without jobs, which the tests here share."""
    yield standing
    standing.end_jobs()


def test_the_processes_of_a_job_are_a_tree_with_the_environment_of_each(daemon: Daemon) -> None:
    job = started(daemon, "--mem", "2G", "--name", "family", "bash", "-c", FAMILY)

    async def look(user: User) -> None:
        await user.until("family")
        await user.press("p")
        await user.until("PROCESSES 4", "command", r"    \_ sleep 602", r"\_ sleep 601", "sleep 60")
        await user.press("down", "enter")
        await user.until("ENVIRONMENT OF", "CUDA_DEVICE_ORDER=", gone="PROCESSES")
        await user.press("end", "home", "pagedown", "escape")
        await user.until("PROCESSES 4")
        await user.press("enter")
        await user.until("ENVIRONMENT OF")
        await user.press("p")
        await user.until("PROCESSES 4")
        await user.press("tab")
        await user.until("DETAILS", gone="PROCESSES")
        await user.press("p", "c", "y")
        await user.until(f"job {job} ", "PROCESSES 0")
        await user.press("enter", "end", "up", "escape")
        await user.until("RUNNING 0")

    use(daemon, look)


def test_a_large_screen_gives_processes_all_of_it(daemon: Daemon) -> None:
    started(daemon, "--mem", "2G", "--name", "family", "bash", "-c", FAMILY)

    async def look(user: User) -> None:
        await user.until("family")
        await user.press("enter")
        await user.until("DETAILS", "MEMORY", "OUTPUT", gone="PROCESSES")
        await user.press("p")
        await user.until("PROCESSES 4", "sleep 602", gone="DETAILS")
        await user.press("shift+tab")
        await user.until("DETAILS", "MEMORY", "OUTPUT", gone="PROCESSES")

    use(daemon, look, size=(160, 50))


def test_a_process_cannot_draw_on_the_screen_with_its_name(daemon: Daemon) -> None:
    started(daemon, "--mem", "1G", "--name", "innocent", "bash", "-c", EVIL)

    async def look(user: User) -> None:
        await user.until("innocent")
        await user.press("p")
        await user.until("?]0;owned??[31mevil?[2J")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", user.screen)

    use(daemon, look)


def test_the_use_of_each_process_is_shown(daemon: Daemon) -> None:
    started(daemon, "--mem", "1G", "--name", "busy", "--", sys.executable, "-c", BUSY)

    async def look(user: User) -> None:
        await user.until("busy")
        await user.press("p")
        await user.until("PROCESSES 1")
        await user.matches(r"\d+  \w+ +[01] +[\d.]+M +\d+% +\d+% +[\d.]+M  .* -c 'while")

    use(daemon, look, size=(120, 30))


def test_a_waiting_job_has_no_processes(daemon: Daemon) -> None:
    started(daemon, "--mem", "8G", "--gpus", "2", "--name", "first", "sleep", "600")
    job = daemon.submit("--mem", "8G", "--gpus", "2", "--name", "second", "true")

    async def look(user: User) -> None:
        await user.until("first", "second")
        await user.press("tab", "p")
        await user.until(f"cannot show the processes of {job}: it waits in the queue")

    use(daemon, look)


def test_processes_stay_on_the_screen_while_the_daemon_is_gone(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(settings={"grace": "1s"}).start()
    started(daemon, "--mem", "2G", "--name", "family", "bash", "-c", FAMILY)

    async def outlive(user: User) -> None:
        await user.until("family")
        await user.press("p")
        await user.until("PROCESSES 4", "sleep 602")
        daemon.kill(signal.SIGKILL)
        await user.until("cannot reach the daemon", "trying again", "sleep 602")
        await user.press("down", "enter")
        await user.until("CUDA_DEVICE_ORDER=")
        daemon.start()
        await user.press("escape")
        await user.until("PROCESSES 4", "sleep 602", gone="trying again")

    use(daemon, outlive)


def test_without_the_daemon_the_screen_says_why_it_has_no_processes(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(settings={"grace": "1s"}).start()
    job = started(daemon, "--mem", "2G", "--name", "family", "bash", "-c", FAMILY)

    async def come_too_late(user: User) -> None:
        await user.until("family")
        daemon.kill(signal.SIGKILL)
        await user.until("trying again")
        await user.press("p")
        await user.until("PROCESSES", "not known: the daemon has not answered yet", "trying again")
        await user.matches(r"(?m) …\s*$")  # the end of the hint, for which there is no room
        assert "PROCESSES 0" not in user.screen
        await user.press("enter", "end", "up")
        daemon.start()
        await user.until(f"job {job} ", "PROCESSES 4", gone="not known")

    use(daemon, come_too_late, size=(60, 20))


def test_no_size_of_screen_is_too_small_for_processes(daemon: Daemon) -> None:
    started(daemon, "--mem", "2G", "--name", "family", "bash", "-c", FAMILY)

    async def storm(user: User) -> None:
        await user.until("family")
        await user.press("p")
        await user.until("PROCESSES 4")
        for size in ((1, 1), (300, 90), (20, 5), (119, 29), (120, 30), (50, 12), (2, 90)) * 5:
            await user.pilot.resize_terminal(*size)
            await user.press("down", "enter" if size[0] == 20 else "tab")
        await user.pilot.resize_terminal(80, 24)
        await user.press("escape", "escape")
        await user.until("RUNNING 1")

    use(daemon, storm)


def test_a_lease_of_a_running_process_has_processes_too(daemon: Daemon) -> None:
    with subprocess.Popen(["bash", "-c", "sleep 604; true"]) as holder:
        daemon.run("hold", "--mem", "1G", "--pid", str(holder.pid))
        (job,) = daemon.client.jobs(state="active").jobs

        async def look(user: User) -> None:
            await user.until("RUNNING 1")
            await user.press("p")
            await user.until("PROCESSES 2", r"\_ sleep 604")

        use(daemon, look)
        daemon.cancel(job.id)
        for pid in children(holder.pid):
            os.kill(pid, signal.SIGKILL)
        holder.kill()


@needs_root
@pytest.mark.skipif(TMUX is None, reason="needs tmux")
def test_the_environment_of_another_user_is_not_shown(tmp_path: Path) -> None:
    ids = ["--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
    # The files of gpulease may be in a folder of root alone.
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    with daemon_for_all() as daemon, terminal(tmp_path, 80, 24) as there:
        started(daemon, "--mem", "1G", "--name", "bert", "sleep", "605")
        there.run(["setpriv", *ids, *reads, *daemon.gpulease("top")])
        there.until("RUNNING 1", "bert", "? help")
        there.press("p")
        there.until("PROCESSES 1", "sleep 605")
        there.press("Enter")
        there.until("cannot read the environment of process", "it belongs to", "hint: the kernel")
        assert "GPULEASE_JOB" not in there.screen
        daemon.end_jobs()
