"""`gpulease plot` of a real job on a real daemon: in a pipe, on a terminal, and into files."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon, daemons, wait_for
from daemon_stand_in.terminal import Terminal
from goldens import mentions

M = 1024**2
HUNGRY = Path(__file__).with_name("hungry.py")
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemons(tmp_path_factory.mktemp("plot")) as make:
        started: Daemon = make().start()
        yield started
        started.end_jobs()


@pytest.fixture(scope="module")
def job(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return a running job that uses 300M of the lease of 1G, as the daemon has recorded."""
    size = tmp_path_factory.mktemp("job") / "size"
    size.write_text("300")
    number = daemon.submit(
        "--mem", "1G", "--name", "grow", "--", sys.executable, str(HUNGRY), str(size)
    )
    wait_for("its use is known", lambda: daemon.job(number)["leases"] and peak(daemon, number))
    return number


def peak(daemon: Daemon, job: int) -> bool:
    used = daemon.client.job_memory(job).gpus[0].used
    return any(each is not None and each > 250 * M for each in used)


def test_a_pipe_gets_a_plain_chart_of_80_columns(daemon: Daemon, job: int) -> None:
    shown = daemon.run("plot", "grow").stdout

    lines = shown.splitlines()
    assert lines[0].startswith(f"job {job}  grow on GPU ")
    assert "█" in shown
    assert "lease" in shown
    assert "\033" not in shown
    assert max(map(len, lines)) == 80
    assert "of 1G" in lines[-1]


def test_a_terminal_gets_colour_unless_it_wants_none(daemon: Daemon, job: int) -> None:
    for no_colour in ("", "1"):
        terminal = Terminal(
            daemon.gpulease("plot", str(job)), (24, 70), LANG="C.UTF-8", NO_COLOR=no_colour
        )
        assert terminal.finish() == 0
        assert ("\033[" in terminal.shown) is not bool(no_colour)
        assert len(terminal.shown.splitlines()) <= 24


def test_a_gpu_shows_what_was_leased_used_and_by_whom(daemon: Daemon, job: int) -> None:
    (lease,) = daemon.job(job)["leases"]

    shown = daemon.run("plot", "--gpu", lease["gpu"], "--since", "10m").stdout
    by_user = daemon.run("plot", "--gpu", lease["gpu"], "--since", "10m", "--by", "user").stdout

    assert "leased: at most 1G of 8G" in shown
    assert {"▒", "█"} <= set(shown)
    assert f"A {daemon.job(job)['user']}" in by_user


def test_the_series_are_json(daemon: Daemon, job: int) -> None:
    view = json.loads(daemon.run("plot", str(job), "--json").stdout)
    (gpu,) = view["gpus"]

    assert (view["job"], gpu["leased"]) == (job, 1024 * M)
    assert max(each or 0 for each in gpu["used"]) > 250 * M
    gpus = json.loads(daemon.run("plot", "--gpu", "0", "--json").stdout)
    assert len(gpus["used"]) <= 1000


@pytest.mark.parametrize(("name", "begin"), [("use.png", PNG), ("use.svg", b"<svg")])
def test_a_chart_is_drawn_into_a_file(
    daemon: Daemon, job: int, tmp_path: Path, name: str, begin: bytes
) -> None:
    for what in ((str(job),), ("--gpu", "0", "--since", "1h"), ("--gpu", "0", "--by", "user")):
        assert not daemon.run("plot", *what, "--out", str(tmp_path / name)).stdout
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_what_cannot_be_written_is_refused(daemon: Daemon, job: int, tmp_path: Path) -> None:
    directory = tmp_path / "a.png"
    directory.mkdir()
    for target in (directory, tmp_path / "use.gif", tmp_path / "none" / "use.png", tmp_path):
        refused = daemon.run("plot", str(job), "--out", str(target), check=False)
        assert refused.returncode == 2
        assert str(target) in refused.stderr
    assert list(tmp_path.iterdir()) == [directory]


def test_png_needs_matplotlib_and_svg_does_not(daemon: Daemon, job: int, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'gpulease';"
        "from gpulease.cli.app import main; main()"
    )
    socket = ("--socket", str(daemon.socket))
    png, svg = (
        subprocess.run(
            [sys.executable, "-c", program, *socket, "plot", str(job), "--out", str(out)],
            capture_output=True, text=True, check=False,
        )
        for out in (tmp_path / "use.png", tmp_path / "use.svg")
    )  # fmt: skip
    assert png.returncode == 125
    assert mentions(png.stderr, "use.svg", "pip install 'gpulease[plot]'")
    assert (svg.returncode, svg.stderr) == (0, "")
    assert [each.name for each in tmp_path.iterdir()] == ["use.svg"]


def test_show_draws_the_chart_below_the_job(daemon: Daemon, job: int) -> None:
    shown = daemon.run("show", "--plot", str(job)).stdout

    assert shown.index("asks") < shown.index("█")
    refused = daemon.run("show", "--plot", "--json", str(job), check=False)
    assert refused.returncode == 2


def test_a_job_without_recorded_use_has_no_chart(make_daemon: Callable[..., Daemon]) -> None:
    # By default, a sample may fall into the job.
    daemon = make_daemon(settings={"sample_every": "1h"}).start()
    quick = daemon.submit("--mem", "1G", "true")
    daemon.wait_until(quick, "ended")

    refused = daemon.run("plot", str(quick), check=False)

    assert refused.returncode == 125
    assert "none of it was recorded" in refused.stderr
    assert daemon.run("show", "--plot", str(quick)).returncode == 0
