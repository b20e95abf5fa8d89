"""What `gpulease status` and `gpulease list` tell a person at a glance, on a terminal."""

import re
from dataclasses import replace
from datetime import timedelta, timezone
from functools import partial

import pytest

from daemon_stand_in import views
from gpulease.cli import job_page, job_table, render, status_page
from gpulease.cli.gpu_rows import GpuRow, bar
from gpulease.cli.tables import draw
from gpulease.domain.memory_estimate import LONG_ENOUGH
from gpulease.drawing.gpus import models
from gpulease.drawing.words import display_width, shorten_middle
from gpulease.units import GIB, KIB
from gpulease.wire.jobs import JobList, JobView, LeaseView, QueueView
from gpulease.wire.machine import GpuView, ProcessView, StatusView, UserWaitingView
from gpulease.wire.text import model, shown_command

NOW = views.NOW.astimezone(timezone(timedelta(hours=1)))
GLYPHS = {"used": "█", "leased": "▒", "unmanaged": "▚", "free": "░", "exclusive": "▓"}


def shown(view: StatusView, width: int = 80, height: int = 24, user: str = "alice") -> list[str]:
    return draw(status_page.page(view, NOW, width, height, user), width).splitlines()


def queue(count: int, first: int = 60, **changed: object) -> list[JobView]:
    """Return jobs that wait, with names that differ at their end."""
    return [
        replace(
            views.job(first + place, name=f"sweep b=16 e=1 s={place}", position=place + 1),
            waits_for=[], behind=5, expected_start_at="2026-03-02T18:00:00Z",
            expected_start=views.probably(), **changed,
        )
        for place in range(count)
    ]  # fmt: skip


def machine(gpus: int, jobs: list[JobView], **changed: object) -> StatusView:
    found = [views.empty_gpu(index, f"GPU-{index}") for index in range(gpus)]
    return views.status(gpus=found, jobs=jobs, **changed)


def busy(gpus: int = 8) -> StatusView:
    """Return a machine with three jobs on each GPU, a queue, and a process without a lease."""
    jobs = [
        views.running(100 + number, f"GPU-{number % gpus}", user=("alice", "bob", "carol")[
            number // gpus], name=f"train {number}")
        for number in range(3 * gpus)
    ]  # fmt: skip
    view = machine(gpus, [*jobs, *different(20)], waiting=40)
    stranger = ProcessView(4242, "eve", "x", "python " + "x" * 200, 6 * GIB, None)
    view.gpus[3].processes = [stranger]
    view.gpus[4].kept_for = 60
    for gpu in view.gpus:
        gpu.memory.used = (10 + gpu.index) * GIB
    return view


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_a_busy_machine_leaves_room_for_ones_own_jobs_and_the_queue(
    width: int, height: int
) -> None:
    lines = shown(busy(), width, height)
    assert len(lines) < height
    assert sum("alice" in line and "train" in line for line in lines) >= 5
    assert sum("sweep" in line for line in lines) >= 3
    assert sum(line.startswith("! eve") for line in lines) == 1
    assert sum(line.count("░") > 0 for line in lines) >= 8


@pytest.mark.parametrize(("width", "height", "least"), [(50, 12, 5), (50, 10, 3), (80, 12, 5)])
def test_on_the_smallest_terminals_ones_own_jobs_come_first(
    width: int, height: int, least: int
) -> None:
    lines = shown(busy(), width, height)
    assert len(lines) < height
    assert sum(line.split()[1:2] == ["alice"] for line in lines) >= least
    assert "8 GPUs" in lines[0]


def different(count: int) -> list[JobView]:
    """Return jobs that wait and share no row."""
    users = ("alice", "bob")
    return [replace(job, user=users[job.id % 2]) for job in queue(count)]


def gpu_rows(lines: list[str]) -> list[str]:
    """Return the rows of GPUs, which end at the legend."""
    begin = next(place for place, line in enumerate(lines) if line.startswith("GPU")) + 1
    end = next((n for n, line in enumerate(lines) if line.startswith("     ") and n >= begin), None)
    return lines[begin:end]


def row_of(lines: list[str], first: str) -> str:
    return next(line for line in lines[2:] if line.split()[:1] == [first])


def test_with_a_long_queue_all_gpus_stay_on_the_screen_and_the_rest_is_counted() -> None:
    running = [views.running(number, gpu=f"GPU-{number}") for number in range(4)]
    lines = shown(machine(4, [*running, *different(22)], waiting=230))

    assert len(lines) < 24
    assert [row.split()[0] for row in gpu_rows(lines)] == ["0", "1", "2", "3"]
    rows = [line for line in lines if "sweep" in line]
    assert lines[-1] == f"and {230 - len(rows)} more: gpulease list --state queued"
    assert len(rows) > 3


@pytest.mark.parametrize("height", range(4, 70, 7))
@pytest.mark.parametrize("width", [40, 80, 140])
def test_what_is_shown_and_what_is_counted_are_all_jobs_on_any_terminal(
    width: int, height: int
) -> None:
    running = [views.running(100 + number, gpu="GPU-0", name="runs") for number in range(40)]
    lines = shown(machine(4, [*running, *different(20)], waiting=1000), width, height)
    text = "\n".join(lines)
    counted = [int(count) for count in re.findall(r"and (\d+)\s+more:", text)]

    rows = re.findall(r"^1\d\d  alice", text, re.MULTILINE)
    assert len(rows) + text.count("sweep") + sum(counted) == 1040
    assert height < 14 or len(lines) < height or width == 40
    assert max(map(display_width, lines)) <= width


def test_each_waiting_job_has_one_line_and_says_what_it_waits_for() -> None:
    reason = "needs 20G, and at most 12G is free on a GPU now, and that takes long"
    first = replace(queue(1)[0], behind=None, waits_for=[1, 2, 3, 4], reason=reason)
    held = QueueView(
        "normal", 0, True, None, [], False, False, None, None, None, 0, blocked_by="held"
    )
    blocked = replace(first, id=9, position=None, queue=held, reason="held by its owner")
    lines = shown(machine(1, [first, replace(queue(2)[1], behind=60), blocked]))

    assert row_of(lines, "1").endswith("in 1-10 h, after one or more of 4 jobs")
    assert row_of(lines, "2").endswith("in 1-10 h, after job 60")
    assert any(line.split()[0] == "9" and line.endswith("held") for line in lines if line)


def test_a_reason_is_shown_whole_or_left_out_beside_a_time() -> None:
    sweep = [
        replace(job, id=2 * job.id - 84, user="eyesual", name=f"vit-b16-aug-seed{job.id}")
        for job in queue(3)
    ]
    wide = replace(sweep[0], id=41, position=4, name="llm", claim=views.claim(70 * GIB, gpus=4))
    array = replace(wide, id=42, position=5, label="13_1999", expected_start_at=None)
    jobs = [replace(job, behind=None, waits_for=[1, 2, 3, 4, 14]) for job in (*sweep, wide, array)]
    reason = "after one or more of 5 jobs"
    lines = shown(machine(1, jobs), 80)
    assert row_of(lines, "5").endswith(reason)
    for first in ("1-3", "4"):
        assert row_of(lines, first).endswith(("in 1-10 h", f"in 1-10 h, {reason}"))
    assert any(line.strip() == reason for line in shown(machine(1, jobs), 60))
    assert "…" not in "".join(line for line in shown(machine(1, jobs), 100) if "one of" in line)


def test_elements_are_named_as_they_stand_in_other_rows() -> None:
    job = views.job(5, position=1, waits_for=[38], waits_for_labels=["9_7"])
    assert row_of(shown(machine(1, [job]), 100), "1").endswith("after job 9_7")
    predicted = replace(
        job, waits_for=[1, 38], expected_start=views.probably(after=38, after_label="9_7")
    )
    assert row_of(shown(machine(1, [predicted]), 100), "1").endswith("after job 9_7")
    behind = replace(job, waits_for=[1, 38], behind=38, behind_label="9_7")
    assert row_of(shown(machine(1, [behind]), 100), "1").endswith("after job 9_7")
    text = draw(job_page.page(behind, NOW), None)
    assert "one or more of 2 jobs" in text
    assert "the reservation of job 9_7" in text


def test_similar_jobs_in_the_queue_share_a_row() -> None:
    llm = views.job(5, name="llm", user="bob", position=1, waits_for=[1], reason="no room")
    sweep = [replace(job, position=job.id - 64) for job in queue(20, first=66)]
    lines = shown(machine(1, [llm, *sweep], waiting=33), 100)

    row = row_of(lines, "2-21")
    assert row.split()[1] == "66-85"
    assert "sweep b=16 e=1 s=0 ... (20)" in row
    assert lines[-1].startswith("and 12 more")


def test_a_pipe_gets_a_row_for_each_job_and_each_gpu() -> None:
    view = machine(16, queue(20))
    text = draw(status_page.page(view, NOW), None)
    assert text.count("sweep b=16") == 20
    assert len(re.findall(r"^ +\d+  [░█]", text, re.MULTILINE)) == 16


def test_sixteen_gpus_share_rows_where_their_state_is_the_same() -> None:
    jobs = [views.running(1, gpu="GPU-3"), views.running(2, gpu="GPU-9")]
    view = machine(16, jobs)
    for place, temperature in ((3, 70), (9, 71)):
        view.gpus[place].memory, view.gpus[place].temperature = views.memory(), temperature
        view.gpus[place].memory.unmanaged = 0
    view.gpus[12].state, view.gpus[12].detail = "drained", "drained by root: new cable"
    view.gpus[4].temperature = 41
    lines = shown(view)

    titles, rows = lines[2], lines[3:6]
    labels = [row.strip().split("  ")[0] for row in rows]
    assert labels == ["0-2, 4-8,", "10-11, 13-15", "3, 9"]
    assert "41-64C" in rows[0] and "70-71C" in rows[2]
    assert "drained by root:" in lines[6]
    assert titles.split() == ["GPU", "memory", "used", "free", "util", "temp"]


def test_the_parts_of_a_bar_differ_without_colour_and_in_ascii() -> None:
    memory = views.memory(leased=12 * GIB, committed=12 * GIB)
    row = partial(GpuRow, "0", memory, unmanaged=memory.unmanaged or 0)
    drawn = bar(row(GIB), 24)
    assert "".join(text for text, _ in drawn) == "█" * 5 + "▒" * 7 + "▚" * 2 + "░" * 10
    assert [style for _, style in drawn] == ["used", "leased", "unmanaged", "free"]
    alone = bar(row(0, is_exclusive=True), 24)
    assert "".join(text for text, _ in alone) == "█" * 5 + "▓" * 7 + "▚" * 2 + "▓" * 10

    letters = render.drawn([drawn, alone, bar(row(0), 24)], render.Screen(
        width=None, colour=False, ascii=True
    ))  # fmt: skip
    assert letters.split() == [
        "#####=======!!..........", "#####xxxxxxx!!xxxxxxxxxx", "#####=======!!//////////",
    ]  # fmt: skip


def test_a_tiny_amount_draws_no_cell_and_a_bar_is_as_long_as_ever() -> None:
    for used in (0, 108 * KIB, GIB, 6 * GIB, 30 * GIB):
        memory = views.memory(used=used, unmanaged=0)
        text = "".join(text for text, _ in bar(GpuRow("0", memory, GIB), 32))
        assert len(text) == 32
        assert ("█" in text) is (used >= GIB)


def gpu_row(gpu: GpuView, jobs: list[JobView] | None = None, width: int = 120) -> str:
    (row,) = gpu_rows(shown(views.status(gpus=[gpu], jobs=jobs or []), width))
    return row


def test_free_memory_is_green_only_if_anyone_can_have_it() -> None:
    free = views.empty_gpu(0, views.FIRST)
    for gpu, style in (
        (free, "good"),
        (replace(free, kept_for=5), "warn"),
        (replace(free, memory=replace(free.memory, headroom=0)), "dim"),
    ):
        row = status_page.page(views.status(gpus=[gpu]), NOW)[2].rows[0]  # type: ignore[union-attr]
        assert row[3][0][1] == style


def test_a_row_says_why_a_gpu_is_not_simply_available() -> None:
    gpu = views.gpu()
    gpu.memory.unmanaged = 0
    alone = views.running(4, claim=views.claim(None, share=50.0, exclusive=True))
    assert gpu_row(gpu, [alone]).endswith("exclusive: job 4")
    assert "░" not in gpu_row(gpu, [alone])
    assert gpu_row(replace(gpu, kept_for=5), [views.running(1)]).endswith("kept for job 5")
    element = replace(gpu, kept_for=12, kept_for_label="8_1")
    assert gpu_row(element, [views.running(1)]).endswith("kept for job 8_1")
    others = replace(alone, label="3_1")
    assert gpu_row(gpu, [others]).endswith("exclusive: job 3_1")
    drained = replace(gpu, state="drained", detail="drained by root: new cable")
    assert gpu_row(drained, [views.running(1)]).endswith("drained by root: new cable")
    lost = replace(gpu, state="lost", detail="it is off the bus")
    assert gpu_row(lost, [views.running(1)]).endswith("lost: it is off the bus")
    assert gpu_row(replace(gpu, slurm=True), [views.running(1)]).endswith("assigned by Slurm")
    # Nobody else says that this memory is gone.
    gpu.memory.unmanaged = 2 * GIB
    assert gpu_row(gpu).endswith("2G used without a lease")
    gone = ProcessView(8, None, None, None, 2 * GIB, 80)
    text = "\n".join(shown(views.status(gpus=[replace(gpu, processes=[gone])])))
    assert "pid 8" not in text and "2G used without" not in text
    stranger = ProcessView(7, "bob", "python", "python3 x.py", 2 * GIB, None)
    assert gpu_row(replace(gpu, processes=[stranger])).endswith("64C")


def test_the_model_is_said_once_and_by_gpu_where_there_are_several() -> None:
    assert model("NVIDIA A100-SXM4-80GB", 80 * GIB) == "A100-SXM4 80G"
    assert model("NVIDIA GeForce RTX 4090", 24564 << 20) == "RTX 4090 24G"
    assert model("Simulated 24G", 24 * GIB) == "Simulated 24G"
    assert model("Simulated 512M", 512 << 20) == "Simulated 512M"
    assert models([("0", "A30 24G"), ("1", "A30 24G")]) == "2 x A30 24G"
    several = [("0", "A30 24G"), ("1", "H100 80G"), ("2", "A30 24G"), ("3", "A30 24G")]
    assert models(several) == "3 x A30 24G (0, 2-3), H100 80G (1)"

    text = "\n".join(shown(machine(4, [])))
    assert text.count("RTX 6000") == 1
    assert "lab7 · 4 x RTX 6000 Ada 24G · driver 580.65.06 · 15:05  " in text


def test_the_first_line_counts_jobs_and_those_of_the_caller() -> None:
    jobs = [views.running(1, user="bob"), views.running(2), *different(2)]
    by_user = [UserWaitingView("alice", 2), UserWaitingView("bob", 20)]
    lines = shown(machine(4, jobs, waiting=22, waiting_by_user=by_user), 120)
    assert lines[0].endswith("2 running (1 yours), 22 waiting (2 yours)")
    assert lines[0].startswith("lab7 ")
    assert [line.split()[0] for line in lines if "train.py" in line] == ["2", "1"]


def test_unknown_is_a_question_mark_and_no_limit_is_empty() -> None:
    lease = LeaseView(views.FIRST, 6 * GIB, None, None, [])
    lines = shown(views.status(jobs=[views.running(1, leases=[lease], expires_at=None)]))
    assert row_of(lines, "1") == "  1  alice  train.py  0          ? / 6G"


def test_a_job_on_many_gpus_has_one_row_on_a_terminal() -> None:
    leases = [LeaseView(f"GPU-{n}", 6 * GIB, (n + 1) * GIB, None, []) for n in range(4)]
    leases[3] = replace(leases[3], over_since_at="2026-03-02T14:04:40Z")
    view = machine(4, [views.running(1, leases=leases)])
    rows = [line for line in shown(view, 120) if "train.py" in line]
    assert [re.split(" {2,}", row.strip())[3:5] for row in rows] == [
        ["0,1,2", "1G-3G / 6G"],
        ["3", "4G / 6G"],
    ]
    assert rows[1].endswith("over")
    assert draw(status_page.page(view, NOW), None).count("train.py") == 4


def test_names_that_differ_at_their_end_stay_different_where_they_are_shortened() -> None:
    jobs = [views.running(n, name=f"vit-base-patch16-224-in21k-finetune-seed-{n}") for n in (1, 2)]
    lines = [line for line in shown(machine(1, jobs), 64) if "vit-" in line]
    names = {line.split()[2] for line in lines}
    assert len(names) == 2
    assert all("…" in name for name in names)
    assert shorten_middle("vit-b16-seed-17", 9) == "vit-…d-17"
    assert shorten_middle("訓練訓練訓練-17", 9) == "訓練…-17"
    assert shorten_middle("abc", 1) == "…"


def test_a_listing_shortens_commands_before_names() -> None:
    command = "/opt/conda/envs/ml/bin/python3.11 /home/alice/work/digits.py --batch 16 " + "x" * 300
    jobs = [
        views.running(n, name=f"resnet50 lr=3e-4 wd=.05 s={n}", command=command) for n in (1, 2)
    ]
    for width in (60, 80, 100):
        text = draw(job_table.page(JobList(jobs), NOW), width)
        assert all(f"resnet50 lr=3e-4 wd=.05 s={n}" in text for n in (1, 2))
    assert "digits.py --batch" in draw(job_table.page(JobList(jobs), NOW), 100)


@pytest.mark.parametrize(
    ("command", "short"),
    [
        ("/home/a/.venv/bin/python3 digits.py --batch 16", "digits.py --batch 16"),
        ("python3 -m torch.distributed.run t.py", "python3 -m torch.distributed.run t.py"),
        ("/usr/bin/python3 'a b.py' 1", "python3 'a b.py' 1"),
        ("'/opt/my env/bin/python' t.py", "'/opt/my env/bin/python' t.py"),
        ("/bin/sh -c 'sleep 1'", "sh -c 'sleep 1'"),
        ("python-config --libs", "python-config --libs"),
        ("x\x1b[2J y", "x?[2J y"),
    ],
)
def test_a_command_is_shown_without_the_paths_of_interpreter_and_script(
    command: str, short: str
) -> None:
    assert shown_command(command) == short


@pytest.mark.parametrize("seconds", [29, 30])
def test_a_run_that_was_too_short_for_advice_says_so(seconds: int) -> None:
    lease = LeaseView(views.FIRST, 8 * GIB, None, None, [], needed=54 << 20)
    ended = f"2026-03-02T14:00:{seconds}Z"
    job = views.over(1, leases=[lease], started_at="2026-03-02T14:00:00Z", ended_at=ended)
    text = draw(job_page.page(job, NOW), None)
    assert "54M of 8G at most (1%)" in text
    assert ("too briefly" in text) is (seconds < LONG_ENOUGH.total_seconds())


def test_an_end_is_said_once() -> None:
    late = views.over(1, 124, outcome="time_limit")
    text = draw(job_table.page(JobList([late, views.over(2, 3)]), NOW), None)
    assert "124" not in text
    assert re.search(r"exited .* 3  ", text)
    assert "EXIT" not in draw(job_table.page(JobList([late]), NOW), None)
