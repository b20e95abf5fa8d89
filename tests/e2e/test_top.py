"""`gpulease top` against a real daemon: its keys and actions, through Textual's own pilot."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from top_rig import User, started, use

from daemon_rig import Daemon, wait_for

CHATTY = "import time\nfor n in range(10**6): print('line', n, flush=True); time.sleep(0.05)"


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


def test_jobs_and_the_queue_appear_as_they_come(daemon: Daemon) -> None:
    async def look(user: User) -> None:
        await user.until("RUNNING 0", "2 x Simulated 8G", "0 running, 0 waiting")
        job = daemon.submit("--mem", "6G", "--name", "bert", "sleep", "600")
        await user.until("RUNNING 1", "bert", "6G")
        daemon.submit("--mem", "8G", "--gpus", "2", "--name", "llm", "true")
        await user.until(
            "WAITING 1", "llm", f"after job {job}", "1 running (1 yours), 1 waiting (1 yours)"
        )
        daemon.cancel(job)
        await user.until("RUNNING 0", gone="bert")

    use(daemon, look)


def test_a_long_listing_leaves_lines_to_the_queue_and_tab_goes_there(daemon: Daemon) -> None:
    for number in range(14):
        started(daemon, "--mem", "1G", "--name", f"bert-{number}", "sleep", "600")
    array = daemon.submit("--mem", "8G", "--array", "0-29", "--name", "sweep", "true")
    for number in range(6):
        daemon.submit("--mem", "8G", "--name", f"llm-{number}", "true")

    async def go(user: User) -> None:
        await user.until("RUNNING 14  8 more below", "WAITING 36  1 more below", "bert-3", "llm-0")
        await user.until(f"{array}_[0-29]")
        await user.press("tab", "e")
        await user.until(f"cannot extend array {array}: ", f"hint: gpulease extend {array} +1h")
        await user.press("k")
        await user.until(f"cannot keep {array}_[0-29]: it waits in the queue")
        await user.press("c", "y")
        await user.until("30 jobs are cancelled", "WAITING 6")
        await user.press("up", "c")
        await user.until("bert-0 of ")
        await user.press("n", "end", "down", "c")
        await user.until("llm-0 of ")
        await user.press("n", "slash")
        await user.type("nothing")
        await user.press("enter")
        await user.until("RUNNING 0 of 14", "WAITING 0 of 6")
        await user.press("escape")
        await user.pilot.resize_terminal(80, 12)
        await user.until("WAITING 6", gone="RUNNING")
        await user.press("tab")
        await user.until("RUNNING 14", gone="WAITING")

    use(daemon, go)


def test_cancelling_asks_first(daemon: Daemon) -> None:
    job = started(daemon, "--mem", "1G", "--name", "bert", "sleep", "600")

    async def cancel(user: User) -> None:
        await user.until("bert")
        await user.press("c")
        await user.until(f"Cancel job {job}, bert", "y yes")
        await user.press("n")
        await user.until("RUNNING 1", gone="y yes")
        assert daemon.job(job)["state"] == "active"
        await user.press("c", "y")
        await user.until(f"job {job}", "RUNNING 0", gone="y yes")

    use(daemon, cancel)
    assert daemon.wait_until(job, "ended")["outcome"] == "cancelled"


def test_extend_and_keep_change_the_selected_job(daemon: Daemon) -> None:
    started(daemon, "--mem", "1G", "--name", "first", "sleep", "600")
    job = started(daemon, "--mem", "1G", "--time", "1h", "--name", "second", "sleep", "600")

    async def change(user: User) -> None:
        await user.until("first", "second")
        await user.press("down", "e")
        await user.until(f"limit of job {job}")
        await user.press("enter")
        await user.until(f"job {job} now ends at")
        await user.press("k", "enter")
        await user.until(f"the lease of job {job} is kept until")

    use(daemon, change)
    shown = daemon.job(job)
    assert shown["claim"]["time_limit"] == 7200
    assert shown["kept_until_at"] is not None


def test_an_error_of_the_daemon_is_shown_with_its_hint(daemon: Daemon) -> None:
    started(daemon, "--mem", "1G", "--name", "bert", "sleep", "600")

    async def fail(user: User) -> None:
        await user.until("bert")
        await user.press("e", "enter")
        await user.until("cannot extend", "hint: ")
        await user.press("down")
        await user.until(gone="cannot extend")
        await user.press("k")
        await user.until("Enter confirms")
        await user.type("x")
        await user.press("enter")
        await user.until("cannot read the time", "hint: ")
        await user.press("e", "escape", "c", "escape")
        await user.until("RUNNING 1", gone="y yes")

    use(daemon, fail)


def test_rows_are_filtered_and_sorted_by_keys(daemon: Daemon) -> None:
    for name, memory, gpu in (("zoo", "1G", "0"), ("bert", "2G", "1"), ("bart", "3G", "1")):
        started(daemon, "--mem", memory, "--gpu", gpu, "--name", name, "sleep", "600")

    def order(user: User) -> list[str]:
        return [word for word in user.screen.split() if word in {"zoo", "bert", "bart"}]

    async def choose(user: User) -> None:
        await user.until("zoo", "bert", "bart")
        assert order(user) == ["zoo", "bert", "bart"]
        await user.press("s", "s", "s")
        await user.until("name^")
        assert order(user) == ["bart", "bert", "zoo"]
        await user.press("r")
        await user.until("namev")
        assert order(user) == ["zoo", "bert", "bart"]
        await user.press("slash")
        await user.until("Show only")
        await user.type("BER")
        await user.press("enter")
        await user.until("RUNNING 1 of 3", gone="zoo")
        await user.press("escape", "g")
        await user.type("1")
        await user.press("enter")
        await user.until("RUNNING 2 of 3", gone="zoo")
        await user.press("escape", "u")
        await user.type("nobody")
        await user.press("enter")
        await user.until("RUNNING 0 of 3")
        await user.press("slash")
        await user.type(" color=red")
        await user.press("enter")
        await user.until("cannot filter by 'color'", "hint: ")
        await user.press("escape", "m")
        await user.until("RUNNING 3")

    use(daemon, choose)


def test_an_open_job_shows_its_details_its_memory_and_its_output(daemon: Daemon) -> None:
    job = started(daemon, "--mem", "2G", "--name", "bert", "--", sys.executable, "-c", CHATTY)

    async def read(user: User) -> None:
        await user.until("bert")
        await user.press("enter")
        await user.until(f"job {job}  bert", "DETAILS", "asks  ", "MEMORY", "OUTPUT", "line 5")
        shown = user.screen
        await user.until("─ lease", "started")
        await user.press("tab", "tab", "home")
        await user.until("OUTPUT", "more below")
        assert shown != user.screen
        await user.press("c", "y")
        await user.until("cancelled")
        await user.press("escape")
        await user.until("RUNNING 0")

    use(daemon, read, size=(160, 50))


def test_on_a_small_screen_an_open_job_has_one_pane_at_a_time(daemon: Daemon) -> None:
    started(daemon, "--mem", "2G", "--name", "bert", "--", sys.executable, "-c", CHATTY)

    async def read(user: User) -> None:
        await user.until("bert")
        await user.press("enter")
        await user.until("DETAILS", "asks  ", gone="OUTPUT")
        await user.press("tab")
        await user.until("MEMORY", gone="DETAILS")
        await user.press("tab")
        await user.until("OUTPUT", "line 5", gone="MEMORY")
        await user.press("shift+tab", "shift+tab")
        await user.until("DETAILS")
        await user.press("question_mark")
        await user.until("close this page")
        await user.press("escape", "q")
        await user.until("RUNNING 1")

    use(daemon, read)


def test_the_selected_row_stays_selected_while_others_come_and_go(daemon: Daemon) -> None:
    first = started(daemon, "--mem", "1G", "--name", "first", "sleep", "600")
    second = started(daemon, "--mem", "1G", "--name", "second", "sleep", "600")

    async def select(user: User) -> None:
        await user.until("first", "second")
        await user.press("down")
        daemon.cancel(first)
        await user.until("RUNNING 1", gone="first")
        await user.press("c")
        await user.until(f"Cancel job {second}")

    use(daemon, select)


def test_a_restart_of_the_daemon_is_noted_and_survived(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(settings={"grace": "1s"}).start()
    job = started(daemon, "--mem", "1G", "--name", "bert", "sleep", "600")

    async def outlive(user: User) -> None:
        await user.until("bert")
        daemon.kill(signal.SIGKILL)
        await user.until("cannot reach the daemon", "trying again", "bert")
        await user.press("c", "y")
        await user.until("cannot reach the daemon")
        daemon.start()
        await user.until("RUNNING 1", "bert", gone="trying again")
        await user.press("enter")
        await user.until(f"job {job}")

    use(daemon, outlive)


@pytest.mark.parametrize("size", [(20, 5), (300, 90)])
def test_every_size_of_screen_shows_the_jobs(daemon: Daemon, size: tuple[int, int]) -> None:
    for number in range(3):
        started(daemon, "--mem", "1G", "--name", f"job{number}", "sleep", "600")

    async def look(user: User) -> None:
        await user.until("RUNNING 3")
        for columns, rows in ((120, 30), size, (80, 24)):
            await user.pilot.resize_terminal(columns, rows)
            await user.until("RUNNING 3")
        await user.press("end", "pageup", "pagedown", "home", "tab", "left", "space")

    use(daemon, look, size)


def test_the_view_stops_looking_when_it_is_left(daemon: Daemon) -> None:
    async def leave(user: User) -> None:
        await user.until("RUNNING 0")
        await user.press("q")

    use(daemon, leave)
    names = {"poll", "output"}
    wait_for("the threads end", lambda: not names & {each.name for each in threading.enumerate()})
