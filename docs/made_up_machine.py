"""A made-up machine for the pictures of the web page: eight GPUs, four users, a full queue.

It answers as the daemon would, from plain values, so that anyone sees the same: jobs that run and
wait, arrays, a drained GPU, processes without a lease, and a week of jobs that have ended.

`take_web_pictures.py` serves and photographs its page.
"""

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from gpulease import __version__
from gpulease.errors import NoSuchJob
from gpulease.units import format_size
from gpulease.wire import history, jobs, machine, usage
from gpulease.wire.text import free_of

G = 1 << 30
NOW = datetime.now(UTC).replace(microsecond=0)
TOTAL = 40 * G
GPUS = 8
DRAINED, WINDOWED = 6, 7
STRANGERS = (
    (1, 31056, "eli", "python3 train_resnet.py --epochs 90", 3.0),
    (1, 31377, "eli", "python3 -m tensorboard.main --logdir runs", 0.4),
    (5, 40112, "zoe", "/opt/conda/bin/python -m ipykernel_launcher -f kernel-7.json", 1.7),
    (5, 40113, "zoe", "/opt/conda/bin/python -m ipykernel_launcher -f kernel-8.json", 0.6),
    (2, 2211, "root", "/usr/bin/dcgmi diag -r 1", 0.3),
    (4, 50221, "eli", "./bench --size 4096", 0.5),
    (7, 50390, None, None, 0.3),
)
"""GPU, pid, user, command and GiB of processes without a lease."""


def at(**ago: float) -> str:
    return (NOW - timedelta(**ago)).isoformat()


class Run(NamedTuple):
    """A job that runs. Sizes are in GiB."""

    id: int
    user: str
    name: str
    gpus: tuple[int, ...]
    leased: float
    used: float
    hours: float
    left: float | None
    utilization: int | None = 80
    element: int | None = None
    """Its index in the array `ARRAY`."""


ARRAY, WAITING_ARRAY = 190, 230
RUNS = (
    Run(152, "ana", "bert-large pretrain seed=1", (0,), 18, 14.2, 29.4, 2.6, 97),
    Run(160, "bob", "resnet50 lr=3e-4 wd=0.05", (0,), 12, 11.3, 9.1, 4.9, 88),
    Run(161, "mei", "notebook", (0,), 4, 0.8, 8.6, 3.4, 2),
    Run(163, "chen", "unet-512 fold=3", (1,), 20, 19.1, 7.2, 3.8, 71),
    Run(164, "mei", "whisper-small finetune de", (1,), 10, 7.7, 6.8, 5.0, 64),
    Run(166, "ana", "vit-b16 distill", (2,), 26, 24.0, 6.1, 7.2, 92),
    Run(170, "bob", "llm-7b lora exclusive", (3,), 36, 33.4, 5.5, 18.5, 99),
    Run(171, "mei", "sd-xl dreambooth", (4,), 16, 15.2, 5.1, 2.9, 83),
    Run(172, "mei", "sd-xl dreambooth eval", (4,), 8, 6.1, 4.9, 1.1, 35),
    Run(173, "chen", "point-transformer", (5,), 14, 9.9, 4.2, 7.8, 77),
    Run(175, "mei", "llama-8b dpo beta=0.1", (5,), 12, 12.4, 3.9, 8.1, 95),
    Run(178, "ana", "nerf garden", (6,), 12, 8.8, 3.1, 0.9, 68),
    Run(180, "bob", "gnn ogbn-products", (7,), 10, 4.4, 2.7, None, 12),
    Run(182, "chen", "mae pretrain 2 gpus", (1, 2), 6, 5.5, 2.4, 9.6, 59),
    Run(184, "ana", "t5-base summarize", (4,), 6, 5.1, 2.0, 4.0, 81),
    Run(185, "bob", "yolo-x crowdhuman", (5,), 8, 7.0, 1.6, 2.4, 74),
    Run(187, "chen", "debug shell", (7,), 4, 0.3, 1.2, 0.8, 0),
    *(
        Run(ARRAY + each, "ana", f"sweep-lr {each}", ((7, 7, 4, 2)[each % 4],), 2, 1.6,
            0.9 - 0.08 * each, 1.1, 66, each)
        for each in range(8)
    ),
)  # fmt: skip
NAMES = ("llm-7b lora", "sweep b=16", "eval", "detr", "bert-large", "unet-512")
USERS = ("bob", "chen", "mei", "ana")


def job(id: int, user: str, name: str, memory: float, **fields: Any) -> jobs.JobView:
    script = name.partition(" ")[0].replace("-", "_")
    view = jobs.JobView(
        id=id, name=name, user=user, state="queued", reason=None, outcome=None, position=None,
        expected_start_at=None,
        command=f"/home/{user}/env/bin/python train.py --config {script}.yaml --workers 4",
        claim=jobs.ClaimView(int(memory * G), None, 1, False, 12 * 3600.0), leases=[],
        submitted_at=at(hours=2), granted_at=None, started_at=None, ended_at=None, expires_at=None,
        exit_status=None, pid=None, directory=None, label=str(id), queue=in_queue(),
    )  # fmt: skip
    for field, value in fields.items():
        setattr(view, field, value)
    return view


def in_queue(array: int | None = None, index: int | None = None) -> jobs.QueueView:
    return jobs.QueueView("normal", 0, False, None, [], False, False, array, index, None, 0)


def running() -> Iterator[jobs.JobView]:
    for run in RUNS:
        started = at(hours=run.hours)
        is_element = run.element is not None
        view = job(
            run.id, run.user, run.name, run.leased, state="active", started_at=started,
            leases=[jobs.LeaseView(
                f"GPU-{each}", int(run.leased * G), int(run.used * G), int(1.02 * run.used * G),
                ["framework", "watch"]) for each in run.gpus],
            granted_at=started, submitted_at=at(hours=run.hours + 0.4), hook="limited",
            expires_at=None if run.left is None else at(hours=-run.left), pid=31337 + run.id,
            utilization=run.utilization,
            label=f"{ARRAY}_{run.element}" if is_element else str(run.id),
            queue=in_queue(ARRAY if is_element else None, run.element),
            events=[
                jobs.EventView(at(hours=run.hours + 0.4), "submit", f"by {run.user}"),
                jobs.EventView(started, "grant", f"on GPU {run.gpus[0]}"),
                jobs.EventView(started, "worker_started", f"pid {31337 + run.id}"),
            ],
        )  # fmt: skip
        view.claim.gpus = len(run.gpus)
        view.claim.exclusive = "exclusive" in run.name
        if run.used > run.leased:
            view.leases[0].over_since_at, view.leases[0].stops_at = at(seconds=20), at(minutes=-2)
        if run.name == "notebook":
            view.kind, view.idle_since_at = "hold", at(hours=3)
        yield view


def waiting() -> Iterator[jobs.JobView]:
    """Yield 16 jobs, and one for the 24 elements of an array that follow them."""
    most = max(free_of(gpu(each)) or 0 for each in range(GPUS))
    for place in range(17):
        user, memory = USERS[place % 4], (24, 20, 6, 32)[place % 4]
        view = job(
            201 + place, user, f"{NAMES[place % 6]} s={place}", memory, position=place + 1,
            submitted_at=at(hours=5 - 0.25 * place), expected_start_at=at(hours=-1.2 - 0.7 * place),
            expected_start=jobs.ExpectedStartView(
                at(hours=-0.4 - 0.23 * place), at(hours=-3.6 - 2.1 * place), 172 if place else 178
            ),
            reason=f"needs {memory}G, and at most {format_size(most)} is free on a GPU now",
            refusals=[jobs.RefusalView(
                f"GPU-{each}", each, "drained" if each == DRAINED
                else f"has {format_size(free_of(gpu(each)) or 0)} free",
                str(each), "drained" if each == DRAINED else "leased") for each in range(GPUS)],
            events=[jobs.EventView(at(hours=5 - 0.25 * place), "submit", f"by {user}")],
        )  # fmt: skip
        if memory == 6 or place == 16:
            view.reason, view.behind = "waits its turn behind job 201", 201
        if place == 0:
            view.suggestions = [jobs.SuggestionView("--mem 17G")]
            view.waits_for, view.waits_for_labels = [178], ["178"]
        if place == 16:
            view.id, view.label, view.user, view.name = WAITING_ARRAY, "230_0", "mei", "grid"
            view.queue = in_queue(WAITING_ARRAY, 0)
            view.queue.array_waiting = jobs.ArrayWaitingView("0-23", 24)
        yield view


WAITING = 16 + 24


def elements(array: int) -> list[jobs.JobView]:
    if array == ARRAY:
        return [each for each in running() if each.queue is not None and each.queue.array == array]
    return [
        job(array + each, "mei", f"grid {each}", 24, label=f"{array}_{each}",
            queue=in_queue(array, each), reason="waits its turn behind job 201")
        for each in range(24)
    ]  # fmt: skip


def gpu(index: int) -> machine.GpuView:
    mine = [run for run in RUNS if index in run.gpus]
    strays = [each for each in STRANGERS if each[0] == index]
    leased, stray = (int(G * sum(found)) for found in (
        (run.leased for run in mine), (each[4] for each in strays)))  # fmt: skip
    used = int(G * sum(run.used for run in mine)) + stray
    is_closed = index in (3, DRAINED)
    memory = machine.MemoryView(
        TOTAL,
        used,
        0,
        TOTAL,
        leased,
        leased,
        stray,
        0 if is_closed else max(0, TOTAL - leased - stray),
    )
    view = machine.GpuView(
        index, f"GPU-{index}", "NVIDIA A100-PCIE-40GB", "available", None, memory,
        (97, 71, 92, 99, 84, 95, 68, 23)[index], (66, 61, 64, 71, 63, 68, 57, 44)[index],
        [machine.ProcessView(pid, user, None if line is None else line.split()[0], line,
                             int(size * G), None, started_at=at(hours=30))
         for _, pid, user, line, size in strays],
        label=str(index), power=(238.0, 190.0, 226.0, 249.0, 212.0, 241.0, 180.0, 88.0)[index],
        power_limit=250.0,
    )  # fmt: skip
    if index == DRAINED:
        view.state, view.detail = "drained", "faulty: XID 79, since Thursday; card ordered"
        view.events = [machine.GpuEventView(at(hours=3), "xid 79", "fell off the bus", 2)]
    if index == 0:
        view.kept_for = 201
    return view


def status(rows: int | None = None) -> machine.StatusView:
    window = machine.WindowView(
        5, "course", ["chen"], ["students"], 1, [f"GPU-{WINDOWED}"], [str(WINDOWED)], True, False,
        at(hours=-14), at(hours=-18), 4 * 3600.0, "0 9 * * mon", "root", at(days=20), False,
    )  # fmt: skip
    queued = list(waiting())
    return machine.StatusView(
        "gpu01", "575.57.08", __version__, False, datetime.now(UTC).isoformat(),
        [gpu(each) for each in range(GPUS)], [*running(), *queued[:rows]], waiting=WAITING,
        more="gpulease list", windows=[window],
        waiting_by_user=[machine.UserWaitingView("mei", 28), machine.UserWaitingView("bob", 4),
                         machine.UserWaitingView("chen", 4), machine.UserWaitingView("ana", 4)],
    )  # fmt: skip


def wandering(seed: object, count: int, low: float, high: float) -> list[int | None]:
    """Return values that change slowly between two bounds."""
    draw = random.Random(str(seed))  # noqa: S311
    value, values = (low + high) / 2, []
    for _ in range(count):
        value = min(high, max(low, value + draw.uniform(-1, 1) * (high - low) / 12))
        values.append(int(value))
    return values


def mean_of(values: Sequence[int | None], part: float = 0.9) -> history.MeanView:
    known = [part * value for value in values if value is not None]
    means = [None if value is None else part * value for value in values]
    return history.MeanView(list(means), sum(known) / len(known) if known else None)


def gpu_history(index: int, since: float, points: int) -> history.GpuHistoryView:
    """Return a history in which the daemon was away for a while, unless it is short."""
    count = min(points, 288)
    away = range(count // 2, count // 2 + count // 14) if since > 1800 else range(0)

    def known(values: Sequence[int | None]) -> list[int | None]:
        return [None if each in away else value for each, value in enumerate(values)]

    owners = []
    for user in sorted({run.user for run in RUNS if index in run.gpus}):
        held = sum(run.used for run in RUNS if index in run.gpus and run.user == user)
        begin = random.Random(f"{user}{index}").randrange(count // 2)  # noqa: S311
        values = known([
            value if i >= begin or i < begin // 2 else 0
            for i, value in enumerate(wandering(user, count, 0.7 * held * G, held * G))
        ])  # fmt: skip
        owners.append(history.OwnerSeriesView(user, values, mean_of(values)))
    stray = known([int(G * 0.5) if each > count // 3 else 0 for each in range(count)])
    used = known([sum(it.used[i] or 0 for it in owners) + (stray[i] or 0) for i in range(count)])
    leased = known([min(TOTAL, ((value or 0) + 7 * G) // (8 * G) * 8 * G) for value in used])
    low = 0 if index == WINDOWED else 40
    busy, heat, watts = (
        known(wandering(f"{name}{index}", count, *bounds))
        for name, bounds in (("busy", (low, 100)), ("heat", (50, 72)), ("watts", (120, 250)))
    )
    means = {"used": used, "leased": leased, "unmanaged": stray, "utilization": busy,
             "temperature": heat, "power": watts}  # fmt: skip
    return history.GpuHistoryView(
        f"GPU-{index}", str(index), "NVIDIA A100-PCIE-40GB", TOTAL, at(seconds=since),
        since / count, used, leased, leased, stray, busy, heat, watts, owners,
        {name: mean_of(values) for name, values in means.items()},
    )  # fmt: skip


def job_memory(id: int) -> history.JobMemoryView:
    found = one(id)
    count, lease = 200, found.claim.memory or G
    peak = max((each.peak or 0 for each in found.leases), default=0)
    most = min(peak, lease)
    grown = [int(min(1.0, (i + 3) / 60) * (value or 0)) for i, value in enumerate(
        wandering("job", count, most - 0.1 * lease, most))]  # fmt: skip
    grown[-1] = peak  # who takes more than the lease is stopped at once
    values: list[int | None] = [None if 120 <= i < 130 else value for i, value in enumerate(grown)]
    pool = [None if value is None else int(0.85 * value) for value in values]
    busy = wandering("job busy", count, 70, 100)
    begin = datetime.fromisoformat(found.started_at or NOW.isoformat())
    end = datetime.fromisoformat(found.ended_at or NOW.isoformat())
    series = [
        history.JobGpuSeriesView(each.gpu, each.gpu[4:], lease, values, pool, busy,
                                 {"used": mean_of(values, 0.97), "utilization": mean_of(busy)})
        for each in found.leases
    ]  # fmt: skip
    step = (end - begin).total_seconds() / count
    return history.JobMemoryView(id, str(id), begin.isoformat(), step, series)


PAST = 150
OUTCOMES = {
    3: ("exited", 1), 7: ("time_limit", 124), 9: ("cancelled", None), 12: ("exited", 137),
    18: ("signaled", 139), 25: ("exited", 1), 41: ("over_lease", 124), 60: ("cancelled", None),
    77: ("exited", 1), 90: ("lost", None), 101: ("time_limit", 124), 118: ("launch_failed", None),
    133: ("exited", 2), 141: ("exited", 1),
}  # fmt: skip


def past(id: int) -> usage.PastJobView:
    outcome, status = OUTCOMES.get(id, ("exited", 0))
    place = id % 4
    ended = (PAST - id) * 168 / PAST
    ran = 0.3 + (id * 37 % 50) / 10
    needed = (13.2, 17.7, 3.4, 28.9)[place]
    return usage.PastJobView(
        id, str(id), f"{NAMES[id % 6]} s={id}", USERS[place], "run", outcome, status,  # type: ignore[arg-type]
        at(hours=ended + ran + 0.6), at(hours=ended + ran), at(hours=ended), 1,
        (24, 20, 6, 32)[place] * G, int(needed * G), 80, None, None, out_of_memory=id == 25,
    )  # fmt: skip


def ended(row: usage.PastJobView) -> jobs.JobView:
    """Return an ended job in full."""
    memory = row.memory or 0
    needed = int(1.14 * memory) if row.outcome == "over_lease" else row.used
    reason = {
        "over_lease": "it held 22.7G of GPU 2 under a lease of 20G for longer than 30s",
        "exited": f"exited with {row.exit_status}",
        "time_limit": "its time limit of 12h was reached",
    }.get(row.outcome or "")
    return job(
        row.id, row.user, row.name, memory / G, state="ended", outcome=row.outcome, reason=reason,
        hint="ask for more with --mem 26G" if row.outcome == "over_lease" else None,
        exit_status=row.exit_status, submitted_at=row.submitted_at, granted_at=row.granted_at,
        started_at=row.granted_at, ended_at=row.ended_at, utilization=row.utilization,
        advised=int(1.15 * (needed or 0)) // G * G if row.exit_status == 0 else None,
        out_of_memory=row.out_of_memory,
        leases=[jobs.LeaseView("GPU-2", memory, None, needed, ["framework", "watch"], needed)],
        events=[
            jobs.EventView(row.submitted_at, "submit", f"by {row.user}"),
            jobs.EventView(row.granted_at or "", "grant", "on GPU 2"),
            jobs.EventView(row.granted_at or "", "worker_started", "pid 4711"),
            jobs.EventView(row.ended_at, "worker_exited", row.outcome),
        ],
    )  # fmt: skip


def one(id: int) -> jobs.JobView:
    """Return the job with this number.

    Raises:
        NoSuchJob: there is none.
    """
    for each in (*running(), *waiting(), *elements(WAITING_ARRAY)):
        if each.id == id:
            return each
    if 1 <= id <= PAST:
        return ended(past(id))
    raise NoSuchJob(f"no job {id}", "gpulease list --all")


HOURS = 3600.0 * G


def shares() -> usage.SharesView:
    users = [
        usage.ShareView("bob", 90 * HOURS, 0.2, 0.7, 66 * G, 4, 4, 1, "201", 31, 640.0, 5400.0),
        usage.ShareView("chen", 130 * HOURS, 0.26, 1.0, 50 * G, 4, 4, 2, "202", 24, 420.0, 3600.0),
        usage.ShareView("mei", 40 * HOURS, 0.14, 0.5, 50 * G, 5, 28, 3, "203", 52, 210.0, 2400.0),
        usage.ShareView("ana", 210 * HOURS, 0.4, 1.8, 82 * G, 12, 4, 4, "204", 18, 95.0, 900.0),
    ]
    return usage.SharesView("fair", 604800.0, at(days=7), users)


def report() -> usage.ReportView:
    uses = [
        usage.UseView("bob", 44, 2, 380_000.0, 1900 * HOURS, 1310 * HOURS, 0.0, 640.0, 5400.0),
        usage.UseView("chen", 23, 0, 210_000.0, 1400 * HOURS, 1290 * HOURS, 0.0, 420.0, 3600.0),
        usage.UseView("ana", 16, 1, 520_000.0, 4100 * HOURS, 3350 * HOURS, 0.0, 95.0, 900.0),
        usage.UseView("mei", 61, 0, 290_000.0, 1700 * HOURS, 1190 * HOURS, 0.0, 210.0, 2400.0),
    ]
    return usage.ReportView(None, uses)


def doctor() -> machine.DoctorView:
    checks = [
        machine.CheckView("driver", "ok", "575.57.08, NVML 12.575"),
        machine.CheckView("GPU 6", "failure", "drained: faulty: XID 79, fell off the bus",
                          "reset or replace the GPU, then: gpulease resume 6"),
        machine.CheckView("disk", "warning", "/var/lib/gpulease has 2.1G free",
                          "delete files, or set keep_output_for to less"),
        *(machine.CheckView(f"GPU {each} health", "ok", "no known fault") for each in range(6)),
        machine.CheckView("enforcement", "ok", "driver, framework, watch"),
    ]  # fmt: skip
    return machine.DoctorView(checks)
