"""The parts of the web page that need no daemon: text, bars, charts, and addresses."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from daemon_stand_in import views
from gpulease import web
from gpulease.cli import status_page, tables
from gpulease.cli.chart import owner_style
from gpulease.cli.plot_file import FILLS
from gpulease.domain.job import NOT_FAILED, Outcome
from gpulease.drawing.arrays import array_of, indices_of
from gpulease.drawing.charts import PLOT_HEIGHT, PLOT_WIDTH, Curve, memory_chart
from gpulease.drawing.endings import (
    commands,
    has_seconds,
    next_size,
    ram_use,
    steps,
    which_try,
)
from gpulease.drawing.words import clock, ids_of, jobs_in, remark_on, size, span_in_minutes, until
from gpulease.errors import BadUsage, GpuleaseError
from gpulease.web.app import is_known
from gpulease.web.bars import bar_of, colors, folded, known_size
from gpulease.web.charts import trend, user_chart
from gpulease.web.filters import Filter, filter_of
from gpulease.web.live import sections, values_of
from gpulease.web.main import listen
from gpulease.web.templates import address_of, counted, linked, render, time
from gpulease.wire.history import GpuHistoryView, MeanView, OwnerSeriesView
from gpulease.wire.jobs import (
    ArrayWaitingView,
    ClaimView,
    EventView,
    JobView,
    LeaseView,
    QueueView,
    SuggestionView,
)
from gpulease.wire.machine import CheckView, GpuView, MemoryView, ProcessView
from gpulease.wire.text import (
    USER_COLOURS,
    claimed,
    has_failed,
    ordinal,
    used_without_lease,
)

M, G = 1 << 20, 1 << 30
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


@pytest.mark.parametrize("address", ["8080", "host:port", "1.2.3.4:99999", ":8080"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(BadUsage):
        listen(address)


@pytest.mark.parametrize("address", ["192.0.2.1:8080", "unix:/no/such/folder/socket"])
def test_an_address_of_another_machine_is_an_error_with_a_hint(address: str) -> None:
    with pytest.raises(GpuleaseError, match="cannot listen on") as error:
        listen(address)
    assert error.value.hint


def test_a_job_has_failed_on_a_page_as_in_the_database() -> None:
    for outcome in Outcome:
        job = views.running(1, state="ended", outcome=outcome.value, exit_status=143)
        assert has_failed(job) is (outcome not in NOT_FAILED), outcome
    assert not has_failed(views.running(1, state="ended", outcome="exited", exit_status=0))


def test_numbers_read_as_people_write_them() -> None:
    assert [known_size(each) for each in (None, 0, 3 * G // 2)] == ["unknown", "0", "1.5G"]
    assert [ordinal(each) for each in (1, 2, 3, 4, 11, 112, 121)] == [
        "1st", "2nd", "3rd", "4th", "11th", "112th", "121st",
    ]  # fmt: skip
    later = (NOON + timedelta(minutes=90, seconds=12)).isoformat()
    assert until(later, NOON, write=span_in_minutes) == "1h 30m"
    assert clock((NOON - timedelta(days=40)).isoformat(), NOON.astimezone()).startswith(
        "2026-10-14"
    )


def test_a_claim_names_all_that_was_asked_for() -> None:
    plain = ClaimView(4 * G, None, 1, False, None)
    assert claimed(plain) == "4G"
    many = ClaimView(None, 40.0, 2, True, None, ["GPU-a", "GPU-b"], ["0", "1"], "A100", 24 * G - 1)
    assert claimed(many) == "2 x 40% exclusive on GPUs 0, 1, A100, 24G or more"


def test_a_user_has_one_color_on_every_page_in_top_and_in_plot() -> None:
    users = [f"user{number}" for number in range(50)]
    together = colors([*users, None])
    sheet = (Path(web.__file__).parent / "static" / "style.css").read_text()
    for user in users:
        (alone,) = colors([user]).values()
        assert together[user].split()[0] == alone
        assert owner_style(user) == alone.replace("o", "owner")
        assert f"--{alone}: {FILLS[owner_style(user)]};" in sheet
    assert together.keys() == set(users)
    # Two with one colour are told apart.
    assert sum(not each.endswith("second") for each in together.values()) == len(USER_COLOURS)


def test_the_rest_of_a_bar_is_free_only_if_it_can_be_leased() -> None:
    assert bar_of(views.gpu(), [], {}, 0).rest == "free"
    assert bar_of(views.gpu(state="drained"), [], {}, 0).rest == "closed"
    alone = views.running(4, user="ana", claim=views.claim(exclusive=True))
    assert bar_of(views.gpu(), [alone], {"ana": "o3"}, 0).rest == "exclusive"
    drawn = sections(views.status(gpus=[views.gpu()], jobs=[alone]))["gpus"]
    assert '<rect class="closed"' in drawn, "hatched, and not in the colour of free memory"


def test_a_little_memory_without_a_process_is_the_drivers() -> None:
    for used, total, shown in (
        (27 * M, 24 * G, 0), (256 * M, 8 * G, 0), (257 * M, 8 * G, 257 * M), (G, 140 * G, 0),
    ):  # fmt: skip
        idle = views.gpu(memory=views.memory(total=total, unmanaged=used), processes=[])
        view = views.status(gpus=[idle])
        assert used_without_lease(idle, view) == shown
        text = tables.draw(status_page.page(view, NOON, 120, 24), 120)
        assert ("used without a lease" in text) is bool(shown)
        html = sections(view)["gpus"]
        assert ("without a lease" in html) is bool(shown)
        assert view.gpus[0].memory.unmanaged == used
    idle.processes = [ProcessView(7, "eve", "python", "python x.py", G, None)]
    assert used_without_lease(idle, view) == G


def gpu(total: int | None, unmanaged: int | None = None) -> GpuView:
    memory = MemoryView(total, 0, 0, total, 0, 0, unmanaged, total)
    return GpuView(0, "GPU-a", "A100", "available", None, memory, None, None, [])


def test_a_process_of_a_job_is_listed_on_a_gpu_that_the_job_has_not_leased() -> None:
    process = ProcessView(7, "ana", "python", "python x.py", G, 12)
    gpus = [views.gpu(0, views.FIRST, processes=[process]), views.gpu(1, views.SECOND)]
    gpus[1].processes = [process]
    shown = values_of(views.status(gpus=gpus, jobs=[views.running(12, views.FIRST)]))
    assert [(where.uuid, each.pid) for where, each in shown["strangers"]] == [(views.SECOND, 7)]


def test_a_bar_never_exceeds_its_gpu() -> None:
    bar = bar_of(gpu(8 * G, 20 * G), [], {}, 20 * G)
    assert [(each.kind, each.width) for each in bar.segments] == [("unmanaged", 100)]
    assert bar_of(gpu(None), [], {}, 0).segments == ()
    assert bar_of(gpu(None), [], {}, 0).summary == "0 used, 0 leased, unknown free of unknown"


def test_a_chart_has_round_axes_and_gaps_where_nothing_is_known() -> None:
    curves = [
        Curve("used", "ana", [G, None, 2 * G]),
        Curve("unmanaged", "none", [G, None, 4 * G]),
        Curve("lease", "leased", [5 * G, 5 * G, 5 * G], is_line=True),
    ]
    chart = memory_chart("Memory", NOON.isoformat(), 1200.0, curves)
    assert chart is not None
    assert [mark.text for mark in chart.y] == ["0", "2G", "4G", "6G"]
    assert [mark.text for mark in chart.x][:2] == [
        f"{NOON.astimezone():%H:%M}", f"{(NOON + timedelta(minutes=15)).astimezone():%H:%M}",
    ]  # fmt: skip
    ana, none, leased = chart.shapes
    assert ana.path.count("M") == 2, "two areas, with a gap between"
    assert none.most == "4G", "what is stacked is not added up in the legend"
    assert leased.path.count("M") == 1
    assert f"{PLOT_WIDTH} {PLOT_HEIGHT}" not in leased.path


def test_on_loopback_only_names_of_this_machine_are_served() -> None:
    names = {"gpu01", "gpu.example.org"}
    for host in ("127.0.0.1:8080", "[::1]:8080", "10.0.0.1", "localhost", "a.localhost:1", "GPU01"):
        assert is_known(host, names), host
    for host in ("evil.example", "127.0.0.1.evil.example:80", "", "[::1", "localhost.evil", "a:b"):
        assert not is_known(host, names), host


@pytest.mark.parametrize(("path", "root"), [("/", "./"), ("/jobs", "./"), ("/jobs/1", "../")])
def test_links_are_relative_to_the_page(path: str, root: str) -> None:
    drawn = render("error.html", path, error=GpuleaseError("cannot"), again=None)
    assert f'href="{root}static/style.css"' in drawn
    assert f'href="{root}jobs"' in drawn


def test_a_gpu_says_all_that_keeps_jobs_from_it() -> None:
    gpu = views.gpu(0, views.FIRST, name="Simulated 24G", state="drained", detail="new fan")
    alone = views.running(12, claim=views.claim(exclusive=True))
    drawn = sections(views.status(gpus=[gpu], jobs=[alone]))
    assert "drained" in drawn["gpus"]
    assert "new fan" in drawn["gpus"]
    assert "exclusive: job" in drawn["gpus"]
    assert drawn["machine"].count("24G") == 1, "the size once"


def test_a_job_that_simply_runs_has_no_remark_and_a_short_command() -> None:
    job = views.running(12, command="/opt/env/bin/python3 /home/ana/train.py --lr 1")
    assert remark_on(job, job.leases, views.NOW) == ("", "")
    drawn = sections(views.status(jobs=[job]))["jobs"]
    assert "train.py --lr 1" not in drawn, "it is on the page of the job"
    assert "active" not in drawn
    over = views.running(12)
    over.leases[0].over_since_at = "2026-03-02T14:04:00Z"
    over.leases[0].stops_at = "2026-03-02T14:10:00Z"
    assert remark_on(over, over.leases, views.NOW, write=span_in_minutes) == (
        "over, stops in 5m",
        "bad",
    )
    over.leases[0].memory_bound = over.leases[0].used
    assert remark_on(over, over.leases, views.NOW)[0].startswith("asked back, stops in")
    assert (
        f"{size(over.leases[0].memory)}..{size(over.leases[0].used)}"
        in (sections(views.status(jobs=[over]))["jobs"])
    )
    stopped = views.running(12, suspended=True)
    assert remark_on(stopped, stopped.leases, views.NOW) == ("suspended", "warn")


def test_the_live_view_changes_at_most_once_a_minute_while_nothing_happens() -> None:
    ends = {"expires_at": "2026-03-02T14:05:59Z", "idle_ends_at": "2026-03-02T14:05:50Z"}
    over = views.running(13, expires_at=None)
    over.leases[0].over_since_at = "2026-03-02T14:04:00Z"
    over.leases[0].stops_at = "2026-03-02T14:05:40Z"
    jobs = [views.running(12, **ends), over]
    drawn = [
        sections(views.status(jobs=jobs, at=f"2026-03-02T14:05:{second:02}Z"))
        for second in (0, 1, 30)
    ]
    assert drawn[0] == drawn[1] == drawn[2]
    assert drawn[0]["jobs"].count("under 1m") == 3


@pytest.mark.usefixtures("berlin")
def test_an_instant_before_a_change_of_the_clocks_has_the_offset_of_its_day() -> None:
    winter = NOON.astimezone()
    july = "2026-07-15T10:30:00Z"
    assert clock(july, winter) == "2026-07-15 12:30"
    assert str(time(july, winter, seconds=True)) == (
        '<time datetime="2026-07-15T10:30:00+00:00" data-seconds>2026-07-15 12:30:00</time>'
    )
    curve = Curve("used", "ana", [G] * 2)
    chart = memory_chart("Memory", "2026-10-24T22:00:00Z", 12 * 3600.0, [curve])
    assert chart is not None
    assert f"{chart.begins_at:%d %H:%M} {chart.ends_at:%d %H:%M}" == "25 00:00 25 23:00"


def element(number: int, index: int, **changed: object) -> JobView:
    queue = QueueView("normal", 0, False, None, [], False, False, 13, index, 8, 0)
    return views.job(number, label=f"13_{index}", queue=queue, **changed)


def test_an_array_counts_the_last_attempt_of_each_element() -> None:
    jobs = [
        element(13, 1, state="ended", outcome="exited", exit_status=2),
        element(14, 2, state="active"),
        element(15, 3),
        element(16, 4),
        element(17, 1, state="ended", outcome="exited", exit_status=0),
    ]
    array = array_of(jobs, views.NOW)
    assert (indices_of(array.elements), array.counts) == ("1-4", "2 queued, 1 running, 1 succeeded")
    assert [(indices_of(group), len(group)) for group in array.groups] == [
        ("2", 1),
        ("1", 1),
        ("3-4", 2),
    ]


def test_the_first_element_and_its_array_have_addresses_of_their_own() -> None:
    assert address_of([element(13, 1)]) == "13_1"
    assert address_of([element(15, 3)]) == "15"
    assert address_of([element(13, 1), element(15, 3)]) == "13"
    assert address_of([views.job(7, label="7")]) == "7"
    waiting = element(15, 3)
    assert waiting.queue is not None
    waiting.queue.array_waiting = ArrayWaitingView("3-99", 97)
    assert (address_of([waiting]), ids_of([waiting])) == ("13", "13_[3-99]")
    assert jobs_in([waiting, views.job(7)]) == 98


def test_the_page_of_a_job_has_what_show_says_about_it() -> None:
    job = replace(
        element(12, 0), steps=1500, ram_held_by="watch", kept_until_at="2026-11-23T13:00:00Z"
    )
    assert job.queue is not None
    job.queue.retries, job.queue.retried, job.queue.retry_on = 3, 1, [7]
    html = render(
        "job.html", "/jobs/12", job=job, now=NOON, asked="12", labels={}, charts=[], actions=[],
        remark=("", ""), is_zoomed=False, own=False,
    )  # fmt: skip
    for said in (steps(job), ram_use(job), which_try(job)):
        assert f"<dd>{said}</dd>" in html
    assert "0 per second" not in html, "how fast it trains is not known"
    assert ">13:00, in 1h<" in html, "the lease is kept"


def test_events_within_an_hour_have_seconds() -> None:
    begin = NOON - timedelta(days=1)
    events = [EventView((begin + timedelta(seconds=n)).isoformat(), "grant", None) for n in (0, 7)]
    assert has_seconds(events[1], events, NOON)
    events.append(EventView(NOON.isoformat(), "end", None))
    assert not has_seconds(events[1], events, NOON)
    assert has_seconds(events[2], events, NOON), "what has just happened"


def test_a_time_says_how_far_away_it_is() -> None:
    past, ahead = (NOON + timedelta(minutes=each) for each in (-90, 45))
    assert ">10:30, 1h 30m ago<" in time(past.isoformat(), NOON, ago=True)
    assert ">12:45, in 45m<" in time(ahead.isoformat(), NOON, ago=True)


def test_a_sentence_links_the_jobs_and_gpus_that_it_names() -> None:
    assert linked("after job 14_3; GPU 0:1 has <b> free", "../") == (
        'after job <a class="in" href="../jobs/14_3">14_3</a>; '
        'GPU <a class="in" href="../gpus/0:1">0:1</a> has &lt;b&gt; free'
    )
    several = linked("waits for jobs 3, 5 or 7 to give back 2G", "./")
    assert [f'jobs/{each}">' in several for each in (3, 5, 7, 2)] == [True, True, True, False]
    assert linked('job "><script>', "./") == "job &#34;&gt;&lt;script&gt;"


def test_elements_that_simply_run_share_a_row() -> None:
    first, second, third = (element(each, each - 12, state="active") for each in (13, 14, 15))
    for each in (first, second, third):
        each.leases = views.running().leases
    idle = replace(third, idle_ends_at="2026-03-02T14:45:00Z")
    rows = folded([first, second, idle, views.running(40)], views.NOW)
    assert [[job.id for job in row.jobs] for row in rows] == [[13, 14], [15], [40]]
    assert (rows[0].leased, rows[0].used, rows[0].percent) == (12 * 1024 * M, 10 * 1024 * M, 83.3)
    drawn = sections(views.status(jobs=[first, second]))["jobs"]
    assert 'href="./jobs/13"' in drawn
    assert "13_[1-2]" in drawn


def test_elements_that_wait_for_one_reason_share_a_row() -> None:
    array = [element(number, number - 20, state="queued", started_at=None, reason="full")
             for number in range(20, 40)]  # fmt: skip
    other = views.job(50, state="queued", name="of another user")
    drawn = sections(views.status(jobs=[*array, other]))["queue"]
    assert drawn.count("<tr id=") == 2
    assert "[0-19]" in drawn
    assert "20 jobs" in drawn
    assert "of another user" in drawn
    assert "All 21 waiting jobs" not in drawn, "all are there"


def test_a_filter_is_read_from_an_address_and_written_into_one() -> None:
    wanted = filter_of({"user": "ana", "state": "asleep", "name": "a*&", "gpu": "0", "end": "x"})
    assert wanted == Filter(user="ana", name="a*&", gpu="0")
    assert wanted.query(page=2) == "?user=ana&gpu=0&name=a%2A%26&page=2"
    assert (wanted.pattern, Filter().pattern) == ("*a[*]&*", None)
    gpus = [views.gpu(0, views.FIRST), views.gpu(1, views.SECOND)]
    mine = views.running(12, views.FIRST, user="ana", name="Big A*&1")
    assert wanted.matches(mine, gpus)
    assert not Filter(gpu="1").matches(mine, gpus)
    assert not Filter(state="waiting").matches(mine, gpus)
    assert Filter(state="waiting").matches(views.job(), gpus)


def history(*used: int | None) -> GpuHistoryView:
    """Return a minute of a GPU of 8 GiB that one user used."""
    means: list[float | None] = list(used)
    owner = OwnerSeriesView("ana", list(used), MeanView(means, None))
    empty: list[int | None] = [None] * len(used)
    return GpuHistoryView("GPU-a", "0", "A100", 8 * G, NOON.isoformat(), 20.0, list(used), empty,
                          empty, empty, [50, None, 100], empty, empty, [owner])  # fmt: skip


def test_the_use_of_a_user_is_summed_up_over_gpus_and_unknown_where_it_is() -> None:
    chart = user_chart("ana", [history(G, None, 2 * G), history(G, None, 3 * G)])
    assert chart is not None
    assert (chart.shapes[0].most, chart.gaps) == ("5G", [(33.333, 33.333)])
    assert user_chart("bob", [history(G, G, G)]) is None


def test_the_curve_of_a_gpu_has_gaps() -> None:
    assert trend(history(G, G, G)) == "M0 20V10h33.33V20ZM66.67 20V0h33.33V20Z"


def test_an_axis_ends_at_the_memory_of_the_gpu_and_what_is_unknown_is_marked() -> None:
    curves = [
        Curve("used", "ana", [G, None, None, 2 * G]),
        Curve("total", "all", [40 * G] * 4, is_line=True),
    ]
    chart = memory_chart("Memory", NOON.isoformat(), 60.0, curves, 40 * G)
    assert chart is not None
    assert [mark.text for mark in chart.y] == ["0", "8G", "16G", "24G", "32G", "40G"]
    assert (chart.y[-1].at, chart.highest, chart.gaps) == (0, 40 * G, [(25.0, 50.0)])


def test_checks_are_counted_the_worst_first() -> None:
    states = ("ok", "failure", "ok", "warning", "failure")
    checks = [CheckView(str(place), state, "") for place, state in enumerate(states)]  # type: ignore[arg-type]
    assert counted(checks) == "2 failures, 1 warning, 2 ok"


def test_users_have_colours_that_are_apart_for_all_eyes() -> None:
    """The colours by the simulation of Machado, Oliveira and Fernandes (2009), in Oklab."""
    seen = [[_oklab(_as_seen(each, eye)) for eye in _EYES] for each in USER_COLOURS]
    nearest = min(
        math.dist(one, other)
        for place, mine in enumerate(seen)
        for others in seen[:place]
        for one, other in zip(mine, others, strict=True)
    )
    assert nearest > 0.1, "0.02 is just seen"


_EYES = (
    ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
)


def _times(rows: tuple[tuple[float, ...], ...], light: list[float]) -> list[float]:
    return [sum(one * other for one, other in zip(row, light, strict=True)) for row in rows]


def _as_seen(colour: str, eye: tuple[tuple[float, ...], ...]) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    light = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]
    return [max(0.0, it) for it in _times(eye, light)]


def _oklab(light: list[float]) -> list[float]:
    cones = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.63))
    sides = ((0.2105, 0.7936, -0.0041), (1.978, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))
    return _times(sides, [math.cbrt(it) for it in _times(cones, light)])


def test_what_a_job_should_have_asked_for() -> None:
    lease = LeaseView(views.FIRST, 20 * G, None, 22 * G, [], needed=int(22.8 * G))
    over = views.over(41, 124, outcome="over_lease", leases=[lease])
    assert next_size(over) == 26 * G
    assert ("Run it again", "gpulease again 41 --mem 26G") in list(commands(over))
    full = views.over(42, 1, out_of_memory=True, leases=[replace(lease, needed=None)])
    assert next_size(full) == 30 * G
    assert next_size(views.over(43, 0, advised=8 * G)) == 8 * G
    waiting = views.job(44, suggestions=[SuggestionView("--mem 2G")])
    assert next(commands(waiting)) == ("Start it now", "gpulease edit 44 --mem 2G")
