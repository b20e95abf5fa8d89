"""`gpulease replay`: its table, its JSON, its files, and its refusals."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from goldens import compare, sentence
from gpulease.cli import replay as command
from gpulease.cli.app import call
from gpulease.cli.tables import draw
from gpulease.replay.results import Result, Settings, baselines, by_user, figures
from gpulease.replay.trace import Run, Server, Trace, TraceJob
from gpulease.units import GIB

REPOSITORY = Path(__file__).parents[2]
LINES = """job,submit_s,duration_s,gpus,memory_mib,user,time_limit_s
long,0,1000,1,20480,alice,
half,0,1000,1,4096,bob,
wide,10,100,2,20480,alice,200
late,20,50,1,2048,bob,60
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(LINES)
    return path


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the trace of the example: more jobs than one process replays."""
    path = tmp_path_factory.mktemp("lab") / "lab.csv"
    script = REPOSITORY / "examples" / "lab_month.py"
    with path.open("w") as out:
        subprocess.run([sys.executable, script], stdout=out, check=True)
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert call(["replay", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def results() -> list[Result]:
    servers = [Server(2, 24 * GIB)]
    jobs = [
        TraceJob(1, 0, 86400, 1, 20 * GIB, "alice"),
        TraceJob(2, 3600, 7200, 1, 8 * GIB, "bob"),
        TraceJob(3, 3600, 600, 1, 4 * GIB, "carol"),
    ]

    def result(settings: Settings, *waits: float) -> Result:
        runs = [
            Run(job, job.submit_s + wait, job.submit_s + wait + job.duration_s, 0, (0,))
            for job, wait in zip(jobs, waits, strict=True)
        ]
        return Result(settings, runs, figures(runs, servers), by_user(runs))

    asked = Settings()
    easy, fifo = baselines(asked)
    return [result(asked, 0, 60, 0), result(easy, 0, 0, 7200), result(fifo, 0, 90000, 90000)]


@pytest.mark.parametrize("width", [None, 60])
def test_the_table(width: int | None) -> None:
    found = results()
    jobs = tuple(run.job for run in found[0].runs)
    page = command.page(found, Trace(jobs, {}), (Server(2, 24 * GIB), Server(8, 80 * GIB)))

    compare(f"replay.{width or 'plain'}", draw(page, width))


def test_what_is_asked_for_is_compared_with_whole_gpus() -> None:
    easy = Settings("easy", whole_gpus=True)

    assert [each.name for each in baselines(Settings(contention="pairs"))] == [
        "easy, whole GPUs",
        "fifo, whole GPUs",
    ]
    assert all(each.contention == "pairs" for each in baselines(Settings(contention="pairs")))
    # Nothing is replayed twice.
    assert baselines(easy) == [replace(easy, policy="fifo")]


@pytest.mark.parametrize(
    ("placement", "contention"),
    [("best", "none"), ("spread", "pairs"), ("best", "curve"), ("best", "slices")],
)
def test_every_job_runs_after_its_submission(
    trace: Path, tmp_path: Path, placement: str, contention: str
) -> None:
    out = tmp_path / "starts.csv"
    options = ["--placement", placement, "--contention", contention, "--out", str(out)]

    assert call(["replay", str(trace), "--servers", "2x24G", *options]) == 0

    with trace.open() as given, out.open() as written:
        asked = {row["job"]: row for row in csv.DictReader(given)}
        runs = {row["job"]: row for row in csv.DictReader(written)}
    assert runs.keys() == asked.keys()
    for name, run in runs.items():
        assert float(run["start_s"]) >= float(asked[name]["submit_s"])
        assert len(run["gpus"].split(";")) == int(asked[name]["gpus"])
        if contention == "none":
            ran = float(run["end_s"]) - float(run["start_s"])
            assert ran == pytest.approx(float(asked[name]["duration_s"]))


def test_whole_gpus_of_different_sizes_are_all_used(tmp_path: Path) -> None:
    path, out = tmp_path / "trace.csv", tmp_path / "starts.csv"
    header = LINES.splitlines()[0]
    path.write_text(f"{header}\nwide,0,60,2,4096,a,\nbig,0,60,1,40000,a,\nsmall,9,60,1,1,a,\n")
    servers = ["--servers", "1x2x24G,1x1x80G", "--whole-gpus"]

    assert call(["replay", str(path), *servers, "--out", str(out)]) == 0

    with out.open() as written:
        runs = {row["job"]: row for row in csv.DictReader(written)}
    assert (runs["wide"]["server"], runs["big"]["server"]) == ("0", "1")
    # Memory is left on every GPU, but no whole GPU.
    assert runs["small"]["start_s"] == "60"


def test_json_has_every_figure_of_every_replay(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, str(trace), "--servers", "2x24G", "--policy", "fifo")

    assert found["servers"] == [{"gpus": 2, "memory": 24 * GIB}]
    assert isinstance(found["results"], list)
    asked, easy, _fifo = found["results"]
    assert (asked["policy"], asked["whole_gpus"], easy["policy"]) == ("fifo", False, "easy")
    assert asked["figures"]["jobs"] == 4
    assert asked["figures"]["mean_wait_s"] >= 0
    assert [user["user"] for user in asked["users"]] == ["alice", "bob"]


def test_a_lab_with_many_jobs_gains_by_the_fair_order(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, str(lab), "--servers", "4x24G")

    assert isinstance(found["results"], list)
    fair, easy, fifo = (each["figures"]["mean_wait_s"] for each in found["results"])
    assert fair < easy <= fifo


def test_a_job_that_is_too_large_is_refused_or_left_out(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["replay", str(trace), "--servers", "1x24G"]) == 2
    sentence("replay-too-large", capsys.readouterr().err)

    assert call(["replay", str(trace), "--servers", "1x24G", "--skip-too-large"]) == 0
    sentence("replay-left-out", capsys.readouterr().err)
    assert report(capsys, str(trace), "--servers", "1x24G", "--skip-too-large")["left_out"] == 1


def test_a_wrong_line_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(LINES.replace("20480,alice,200", "20G,alice,200"))

    assert call(["replay", str(path), "--servers", "2x24G"]) == 2
    sentence("replay-wrong-line", capsys.readouterr().err.replace(f"{tmp_path}/", ""))
