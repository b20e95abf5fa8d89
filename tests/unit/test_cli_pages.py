"""What `status`, `list`, `show` and `doctor` print, compared with files kept in tests/golden.

`GPULEASE_GOLDEN=write pytest tests/unit/test_cli_pages.py` writes them; review the difference.
"""

import io
import re
import sys
import time
from dataclasses import replace
from datetime import timedelta, timezone

import pytest

from daemon_stand_in import views
from goldens import compare
from gpulease.cli import (
    doctor,
    job_gpus,
    job_page,
    render,
    report,
    show_jobs,
    tables,
    topology_page,
    window_page,
)
from gpulease.cli import job_table as listing
from gpulease.cli import status_page as status
from gpulease.cli.job_watch import stderr_status
from gpulease.cli.tables import Page, Table
from gpulease.drawing.words import display_width
from gpulease.errors import CannotLease
from gpulease.units import GIB, MIB
from gpulease.wire.jobs import (
    DeviceView,
    EventView,
    ExplainView,
    HookLimitView,
    HookView,
    JobList,
    JobView,
    LeaseView,
    PoolView,
    QueueView,
    SuggestionView,
)
from gpulease.wire.machine import (
    CheckView,
    DoctorView,
    GpuTopologyView,
    LinkView,
    PauseView,
    ResourcesView,
    TopologyView,
    WindowList,
    WindowView,
)
from gpulease.wire.usage import (
    PastJobView,
    PredictionsView,
    ReportView,
    SharesView,
    ShareView,
    UsePartView,
    UseView,
)

NOW = views.NOW.astimezone(timezone(timedelta(hours=1)))


def jobs() -> JobList:
    ended = views.over(9, exit_status=1, name="eval", command="python3 eval.py --data /mnt/images")
    late = views.over(10, 124, outcome="time_limit", user="bob")
    return JobList([ended, late, views.running(12), views.waiting(), views.second_waiting()])


def suggested() -> list[SuggestionView]:
    return [SuggestionView("--mem 15G"), SuggestionView("--time 2h", before=12)]


def dry() -> ExplainView:
    waiting = views.waiting()
    return ExplainView(
        starts_now=False,
        gpus=[],
        claim=replace(waiting.claim, time_limit=14400.0),
        sized=None,
        runs_for=7200,
        reason=waiting.reason,
        position=2,
        expected_start_at=waiting.expected_start_at,
        expected_start=waiting.expected_start,
        refusals=waiting.refusals,
        waits_for=waiting.waits_for,
        behind=12,
        suggestions=suggested(),
    )


def past_jobs() -> list[PastJobView]:
    ended = PastJobView(
        id=19, label="17_2", name="sweep.py", user="alice", kind="run", outcome="exited",
        exit_status=0, submitted_at="2026-03-02T09:00:00Z", granted_at="2026-03-02T10:00:00Z",
        ended_at="2026-03-02T12:30:00Z", gpus=2, memory=4 * GIB, used=3 * GIB, utilization=85,
        time_limit=14400.0, command="0a1b 2c3d", ram_peak=12 * GIB, cpu_seconds=27000.0,
    )  # fmt: skip
    failed = replace(
        ended, id=12, label="12", name="train.py", user="bob", exit_status=1, gpus=1, used=None,
        utilization=None, ram_peak=None, cpu_seconds=None,
    )  # fmt: skip
    short = replace(failed, id=11, label="11", out_of_memory=True)
    never = replace(
        failed, id=9, label="9", kind="hold", outcome="cancelled", exit_status=None, granted_at=None
    )
    of_slurm = replace(failed, id=8, label="8", kind="slurm", exit_status=0, slurm_job=17)
    return [ended, failed, short, never, of_slurm]


def shares() -> SharesView:
    first = ShareView("bob", 40.0 * GIB * 3600, 0.04, 0.12, 0, 0, 3, 1, "27", 4, 90.0, 300.0)
    second = ShareView("alice", 900.0 * GIB * 3600, 0.9, 2.7, 8 * GIB, 2, 40, 2, "17_9", 80, 6000.0)
    idle = ShareView("carol", 60.0 * GIB * 3600, 0.06, 0.18, 0, 0, 0, None, None)
    return SharesView("fair", 86400.0, "2026-02-23T14:05:00Z", [first, second, idle])


def hold() -> JobView:
    shown = "bash of process 4242"
    return views.running(3, kind="hold", name="hold", command=shown, pid=None, expires_at=None)


def lingering() -> JobView:
    return views.running(
        12,
        reason="its main process has ended (exit status 0); what it left behind keeps the lease",
        events=[
            EventView("2026-03-02T13:53:00Z", "main_exited", "exit status 0; others still run")
        ],
        terminal=True,
        directory="/var/lib/gpulease/jobs/12",
        main_exited_at="2026-03-02T13:53:00Z",
        processes=2,
    )


def over_lease() -> JobView:
    lease = LeaseView(views.FIRST, 6 * GIB, 7 * GIB, 8 * GIB, ["framework", "watch"])
    over = replace(lease, over_since_at="2026-03-02T14:04:40Z", stops_at="2026-03-02T14:05:10Z")
    return views.running(12, leases=[over])


def above() -> JobView:
    return views.running(12, leases=[LeaseView(views.FIRST, 6 * GIB, 7 * GIB, 7 * GIB, ["watch"])])


def with_hooks(state: str = "failed") -> JobView:
    at = "2026-03-02T13:31:00Z"
    limits = [HookLimitView(views.FIRST, 3400 * MIB), HookLimitView("GPU-gone", None)]
    why = "PyTorch 2.99.0 is not limited to the lease at torch.cuda._lazy_call"
    hooks = [
        HookView(4711, "tensorflow", "2.21.0", "limited", None, limits, at),
        HookView(4712, "tensorflow", "2.21.0", "limited", None, [], at),
        HookView(4713, "torch", "2.99.0", "failed", why, [], at),
        HookView(4714, "", "", "absent", "it is not Python", [], at),
    ]
    return views.running(12, hook=state, hooks=hooks)


def with_devices() -> JobView:
    """Return a job that trains on a divided GPU and on another one."""
    devices = [
        DeviceView(views.FIRST, ["/GPU:0", "/GPU:1", "cuda:0"], "NVIDIA A100", "0000:3b:00.0"),
        DeviceView(views.SECOND, ["/GPU:2", "/GPU:3", "cuda:1"], "NVIDIA A100", None),
    ]
    return views.running(
        12, devices=devices, first_use_at="2026-03-02T13:30:12.500Z", utilization=83, steps=1500,
        steps_per_second=12.345, hook="none",
    )  # fmt: skip


def after_its_end(**known: object) -> JobView:
    lease = LeaseView(views.FIRST, 4 * GIB, None, 4 * GIB - 1, ["framework"], 3 * GIB)
    lease.pools = [PoolView("torch", "2.13.0", 3400 * MIB, 3300 * MIB, 696 * MIB, 580 * MIB)]
    return replace(views.over(17, 0), leases=[lease], **known)  # type: ignore[arg-type]


def test_the_summary_is_one_line_of_what_is_known() -> None:
    trained = with_devices()
    known = {
        name: getattr(trained, name)
        for name in ("first_use_at", "utilization", "steps", "steps_per_second", "started_at")
    }
    simulated = DeviceView(views.FIRST, ["/CPU:0"], "Simulated GPU", None, simulated=True)
    lines = [
        *job_gpus.device_lines(trained),
        *job_gpus.device_lines(views.running(12, devices=[simulated])),
        job_gpus.summary_line(after_its_end(**known)),
        job_gpus.summary_line(after_its_end(steps=3, started_at=None)),
        job_gpus.summary_line(replace(views.over(17, 0), leases=[], advised=None)),
        job_gpus.summary_line(replace(views.over(17, 0), leases=[], advised=3 << 30)),
    ]

    compare("job-report", "\n".join(lines) + "\n")


def suspended() -> JobView:
    return views.running(12, suspended=True)


def stopped() -> JobView:
    events = [
        EventView("2026-03-02T12:00:00Z", "grant", None),
        EventView("2026-03-02T14:04:40Z", "revoke", "it held 7G of GPU 0"),
    ]
    return views.running(12, state="releasing", grace=60.0, events=events)


def idle() -> JobView:
    return views.running(
        12,
        idle_since_at="2026-03-02T13:33:00Z",
        idle_ends_at="2026-03-02T14:09:00Z",
        kept_until_at="2026-03-02T14:30:00Z",
    )


def out_of_memory() -> JobView:
    lease = LeaseView(views.FIRST, 4 * GIB, None, 4 * GIB - 1, ["framework"], 3 * GIB)
    lease.pools = [
        PoolView("torch", "2.13.0", 3400 * MIB, 3300 * MIB, 696 * MIB, 580 * MIB),
        PoolView("tensorflow", "2.21.0", None, 48 * MIB, None, None),
    ]
    return replace(
        views.over(17, 1),
        leases=[lease],
        reason="exited with 1: it ran out of GPU memory, having used up to 3.9G of a lease of 4G; "
        "job 18 tries again with 6G",
        sized="4G, since train.py used up to 3.4G in 3 runs",
        out_of_memory=True,
        retry_of=16,
        retried_as=18,
    )


def requeued() -> JobView:
    return replace(
        views.over(17, 143, outcome="preempted"),
        reason="it made way for job 19; requeued as job 20",
        retry_of=12,
        retried_as=20,
        events=[EventView("2026-03-01T09:00:00Z", "requeued", "continues job 12: it made way")],
        queue=QueueView(
            "low", 5, False, None, [], True, True,
            array=None, array_index=None, array_most=None, requeued=1,
        ),
    )  # fmt: skip


def used() -> ReportView:
    hour = 3600.0
    return ReportView(
        None,
        [
            UseView(
                "alice",
                12,
                1,
                30 * hour,
                30 * hour * 8 * GIB,
                30 * hour * 3 * GIB,
                30 * hour * 5 * GIB,
                90.0,
                600.0,
                cpu_seconds=120 * hour,
                ram_peak=48 * GIB,
            ),
            UseView("bob", 1, 0, 0.0, 0.0, 0.0),
        ],
        PredictionsView(9, 780.0, 13, 1260.0, 8, 6),
    )


def used_by_week() -> ReportView:
    hour = 3600.0
    parts = [
        UsePartView(
            day, 12, 1, 30 * hour, 30 * hour * 8 * GIB, 30 * hour * 3 * GIB, 30 * hour * 5 * GIB,
            90.0, 600.0,
        )
        for day in ("2026-02-23", "2026-03-02")
    ]  # fmt: skip
    return ReportView(None, [], by="week", parts=parts)


def windows() -> WindowList:
    exam = WindowView(
        id=1, name="exam", users=["alice"], groups=[], gpus=2, on=[views.FIRST, views.SECOND],
        labels=["0", "1"], named=False, is_on=True, begins_at="2026-03-02T13:00:00Z",
        ends_at="2026-03-03T05:00:00Z", lasts_for=57600.0, cron=None, created_by="root",
        created_at="2026-03-01T09:00:00Z", lifts_limits=False, other_jobs=[12],
    )  # fmt: skip
    nights = replace(
        exam, id=2, name="nights", users=["alice", "bob"], groups=["lab"], gpus=1, named=True,
        on=[views.FIRST], labels=["0"], is_on=False, begins_at="2026-03-03T21:00:00Z",
        ends_at="2026-03-04T07:00:00Z", cron="0 22 * * tue-fri", lifts_limits=True, other_jobs=[],
    )  # fmt: skip
    fans = replace(
        exam, id=3, name="fans", users=[], gpus=2, on=[], labels=[], is_on=False,
        begins_at="2026-04-02T21:00:00Z", ends_at="2026-04-02T23:00:00Z", other_jobs=[],
    )  # fmt: skip
    return WindowList([exam, nights, fans])


def topology() -> TopologyView:
    """Return 16 GPUs in bridged pairs on two sockets, of which one is not known."""

    def link(one: int, other: int) -> LinkView:
        if one // 2 == other // 2:
            return LinkView(f"GPU-{other}", 4, "PHB")
        return LinkView(f"GPU-{other}", 0, "NODE" if one // 8 == other // 8 else "SYS")

    gpus = [
        GpuTopologyView(
            f"GPU-{one}", str(one), "NVIDIA A100", one // 8, "0-31,64-95" if one < 8 else "32-63",
            [link(one, other) for other in range(15) if other != one],
        )
        for one in range(15)
    ]  # fmt: skip
    return TopologyView([*gpus, GpuTopologyView("GPU-15", "15", "NVIDIA A100", None, None, [])])


RESOURCES = ResourcesView(240 * GIB, 96 * GIB, 40 * GIB, 104 * GIB, 60, 24, 36)


def pages(width: int | None) -> dict[str, Page]:
    busy = views.busy_status()
    two = [
        LeaseView(views.FIRST, 6 * GIB, 7 * GIB, 7 * GIB, []),
        LeaseView(views.SECOND, 6 * GIB, None, None, ["framework", "driver"]),
    ]
    checks = [
        CheckView("driver", "ok", "580.65.06 reads 2 GPUs"),
        CheckView("cgroups", "warning", "they are not v2", "boot with unified cgroups"),
        CheckView("GPU 1", "failure", "it cannot be read", "reboot"),
    ]
    events = [
        EventView("2026-03-02T13:29:00Z", "submitted", "6G"),
        EventView("2026-03-02T13:30:00Z", "grant", None),
    ]
    patient = replace(views.waiting(), gives_up_at="2026-03-02T14:30:00Z")
    return {
        "status-busy": status.page(busy, NOW, width),
        "status-quiet": status.page(views.status(), NOW, width),
        "status-ram": status.page(views.status(resources=RESOURCES), NOW, width),
        "status-paused": status.page(
            views.status(
                jobs=[views.job(17, reason="root paused the queue: new driver")],
                paused=PauseView("root", "new driver", "2026-03-02T13:40:00Z"),
            ),
            NOW,
            width,
        ),
        "status-long-queue": status.page(replace(views.busy_status(), waiting=9_982), NOW),
        "status-no-gpus": status.page(views.status(gpus=[], simulated=True), NOW, width),
        "status-troubled": status.page(views.troubled_status(), NOW, width),
        "status-topology": topology_page.page(topology(), width),
        "status-topology-empty": topology_page.page(TopologyView([]), width),
        "list": listing.page(jobs(), NOW),
        "list-filtered": listing.page(JobList(jobs().jobs, next=9), NOW, newest=True),
        "list-empty": listing.page(JobList([]), NOW),
        "list-hold": listing.page(JobList([hold(), views.running(2, name="訓練 e\u0301")]), NOW),
        "status-hold": status.page(views.status(jobs=[hold()]), NOW, width),
        "show-hold": job_page.page(hold(), NOW, {views.FIRST: 0}),
        "show-lingering": job_page.page(lingering(), NOW, {views.FIRST: 0}),
        "show-waiting": job_page.page(replace(patient, notify=["fail", "time-left=600"]), NOW),
        "show-behind": job_page.page(
            replace(patient, behind=12, suggestions=suggested(), refusals=[]), NOW
        ),
        "show-active": job_page.page(
            views.running(12, leases=two, events=events), NOW, {views.FIRST: 0, views.SECOND: 1}
        ),
        "show-linked": job_page.page(
            views.running(12, leases=two, nvlinks=4), NOW, {views.FIRST: "0", views.SECOND: "2"}
        ),
        "status-over": status.page(views.status(jobs=[over_lease()]), NOW, width),
        "show-over": job_page.page(over_lease(), NOW, {views.FIRST: 0}),
        "status-above": status.page(views.status(jobs=[above()]), NOW, width),
        "show-hooks": job_page.page(with_hooks(), NOW, {views.FIRST: 0}),
        "status-hooks": status.page(views.status(jobs=[with_hooks("absent")]), NOW, width),
        "show-devices": job_page.page(with_devices(), NOW, {views.FIRST: 0}),
        "show-stopped": job_page.page(stopped(), NOW, {views.FIRST: 0}),
        "show-idle": job_page.page(idle(), NOW, {views.FIRST: 0}),
        "show-suspended": job_page.page(suspended(), NOW, {views.FIRST: 0}),
        "list-suspended": listing.page(JobList([suspended(), views.running(13)]), NOW),
        "show-ended": job_page.page(
            views.over(
                17,
                137,
                outcome="signaled",
                ram_peak=12 * GIB,
                cpu_seconds=9000.0,
                reason="ended by signal 9: it used all of its 12G of RAM, and the kernel killed "
                "one of its processes",
                hint="use --ram 15G",
            ),
            NOW,
        ),
        "show-preempted": job_page.page(requeued(), NOW),
        "show-out-of-memory": job_page.page(out_of_memory(), NOW, {views.FIRST: 0}),
        "status-windows": status.page(views.status(windows=windows().windows), NOW, width),
        "reserve": window_page.page(windows(), NOW),
        "reserve-empty": window_page.page(WindowList([]), NOW),
        "report": report.page(used()),
        "report-by-week": report.page(used_by_week()),
        "dry-run-waits": show_jobs.dry_run_page(dry(), NOW),
        "dry-run-starts": show_jobs.dry_run_page(
            replace(
                dry(),
                starts_now=True,
                gpus=["0", "1"],
                position=None,
                expected_start_at=None,
                reason=None,
                waits_for=[],
                behind=None,
                refusals=[],
                suggestions=[],
            ),
            NOW,
        ),
        "report-empty": report.page(ReportView(None, []), " in the last 7d"),
        "report-shares": report.shares_page(shares()),
        "history": listing.past_page(past_jobs(), NOW),
        "history-empty": listing.past_page([], NOW),
        "doctor": doctor.page(DoctorView(checks)),
    }


@pytest.mark.parametrize("name", list(pages(None)))
def test_a_pipe_gets_all_of_it_in_plain_text(name: str) -> None:
    compare(f"{name}.plain", tables.draw(pages(None)[name], None))


@pytest.mark.parametrize("name", list(pages(60)))
def test_a_narrow_terminal_is_enough(name: str) -> None:
    text = tables.draw(pages(40)[name], 40)
    compare(f"{name}.40", text)
    assert max(map(display_width, text.splitlines()), default=0) <= 40


@pytest.mark.parametrize("width", range(20, 140, 8))
def test_no_width_is_ever_exceeded_while_a_column_may_leave(width: int) -> None:
    for page in pages(width).values():
        for block in page:
            if isinstance(block, Table):
                kept = tables.widths(block, width)
                line = sum(kept.values()) + 2 * (len(kept) - 1)
                assert line <= width or not any(block.columns[each].leaves for each in kept)


@pytest.mark.parametrize("width", [None, 80])
def test_ten_thousand_rows_are_drawn_at_once(width: int | None) -> None:
    page = listing.page(JobList([views.running(number) for number in range(10_000)]), NOW)
    began = time.process_time()
    tables.draw(page, width, colour=True)
    # About 0.2 s on a quiet machine, where rich's own tables take 6 s.
    assert time.process_time() - began < 1.0


def test_colour_changes_nothing_that_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    page = pages(100)["status-busy"]
    render.show_page(page, render.Screen(width=100, colour=False))
    plain = capsys.readouterr().out
    render.show_page(page, render.Screen(width=100, colour=True))
    coloured = re.sub(r"\033\[[0-9;]+m", "", capsys.readouterr().out)
    words = [word for word in plain.split() if word.isalnum()]
    assert [word for word in coloured.split() if word.isalnum()] == words


def test_an_error_is_a_sentence_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_error(
        CannotLease("cannot lease 30G: the largest GPU here offers 24G", "ask for 24G")
    )
    compare("error", capsys.readouterr().err)


def test_strangers_cannot_steer_the_terminal() -> None:
    evil = views.running(1, name="\x1b[2Jx", user="a\nb", command="c\x07d", reason="\u202ee")
    text = tables.draw(listing.page(JobList([evil]), NOW), None)
    text += tables.draw(job_page.page(evil, NOW), None)
    text += tables.draw(status.page(views.status(jobs=[evil]), NOW), None)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "a?b" in text


def test_wide_characters_keep_columns_straight() -> None:
    listed = JobList([views.running(1, name="訓練"), views.running(2, name="train")])
    lines = tables.draw(listing.page(listed, NOW), None).splitlines()
    assert len({display_width(line[: line.index("active")]) for line in lines[1:]}) == 1


@pytest.mark.parametrize(
    ("variables", "width", "colour"),
    [
        ({"COLUMNS": "72"}, 72, False),
        ({"COLUMNS": "5"}, 20, False),
        ({"COLUMNS": "wide"}, None, False),
        ({"FORCE_COLOR": "1"}, None, True),
        ({"FORCE_COLOR": "0", "CLICOLOR_FORCE": ""}, None, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, None, False),
    ],
)
def test_variables_decide_the_width_and_the_colour_of_a_pipe(
    variables: dict[str, str], width: int | None, colour: bool
) -> None:
    assert render.screen_of(io.StringIO(), variables) == render.Screen(width, colour=colour)


def test_the_status_line_is_not_rewritten_in_a_pipe_of_known_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not stderr_status().line.rewrites
