"""Take the pictures of the web page in docs/web/, with chromium.

The pages and the browser are real. The machine is made up, so that anyone can take the same
pictures: this script answers as its daemon.

    python docs/take_web_pictures.py
"""

import random
import socket
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec
import uvicorn
from playwright.sync_api import Browser, sync_playwright

from gpulease import Client, __version__
from gpulease.web.app import build
from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.live import LiveStatus
from gpulease.wire import history, jobs, machine, usage

G = 1 << 30
FOLDER = Path(__file__).parent / "web"
CHROMIUM = "/usr/bin/chromium"
NOW = datetime.now(UTC).replace(microsecond=0)
DESK, PHONE = (1280, 800), (390, 844)
TOTAL = 40 * G


class Picture(NamedTuple):
    """A picture to take."""

    name: str
    path: str
    size: tuple[int, int] = DESK
    scheme: str = "light"


PICTURES = (
    Picture("now", "/"),
    Picture("now-dark", "/", scheme="dark"),
    Picture("now-phone", "/", PHONE),
    Picture("queue", "/queue"),
    Picture("past", "/past"),
    Picture("job", "/jobs/41"),
    Picture("gpu", "/gpus/0?span=day"),
    Picture("people", "/people"),
    Picture("health", "/health"),
)


def at(**ago: float) -> str:
    return (NOW - timedelta(**ago)).isoformat()


class Run(NamedTuple):
    """A job that runs."""

    id: int
    user: str
    name: str
    gpu: int
    leased: int
    used: float
    hours: float
    left: float


RUNS = (
    Run(38, "ana", "bert-large pretrain seed=1", 0, 18, 14.2, 9.4, 2.6),
    Run(41, "bob", "resnet50 lr=3e-4 wd=0.05", 0, 16, 11.3, 3.1, 4.9),
    Run(42, "chen", "unet-512 fold=3", 1, 24, 23.1, 2.2, 3.8),
    Run(43, "dora", "notebook", 1, 8, 1.2, 1.6, 6.4),
    Run(45, "ana", "vit-b16 distill", 2, 36, 31.0, 0.8, 7.2),
)


def job(id: int, user: str, name: str, memory: float, **fields: Any) -> jobs.JobView:
    claim = jobs.ClaimView(int(memory * G), None, 1, False, 12 * 3600.0)
    view = jobs.JobView(
        id=id, name=name, user=user, state="queued", reason=None, outcome=None, position=None,
        expected_start_at=None, command=f"python train.py --config {name.partition(' ')[0]}.yaml",
        claim=claim, leases=[], submitted_at=at(hours=2), granted_at=None, started_at=None,
        ended_at=None, expires_at=None, exit_status=None, pid=None, directory=None, label=str(id),
    )  # fmt: skip
    for field, value in fields.items():
        setattr(view, field, value)
    return view


def running() -> Iterator[jobs.JobView]:
    for run in RUNS:
        lease = jobs.LeaseView(
            f"GPU-{run.gpu}", run.leased * G, int(run.used * G), int(1.05 * run.used * G),
            ["framework", "watch"],
        )  # fmt: skip
        yield job(
            run.id, run.user, run.name, run.leased, state="active", leases=[lease],
            started_at=at(hours=run.hours), granted_at=at(hours=run.hours),
            submitted_at=at(hours=run.hours + 0.4), expires_at=at(hours=-run.left), utilization=87,
            events=[
                jobs.EventView(at(hours=run.hours + 0.4), "submit", f"by {run.user}"),
                jobs.EventView(at(hours=run.hours), "grant", f"on GPU {run.gpu}"),
                jobs.EventView(at(hours=run.hours), "worker_started", "pid 31337"),
            ],
        )  # fmt: skip


def waiting() -> Iterator[jobs.JobView]:
    users, names = ("bob", "chen", "dora", "eli"), ("llm-7b lora", "sweep b=16", "eval", "detr")
    for place in range(22):
        pick = place % 4
        yield job(
            50 + place, users[pick], f"{names[pick]} s={place}", (20, 24, 6, 32)[pick],
            position=place + 1, expected_start_at=at(hours=-1.2 - 0.7 * place),
            expected_start=jobs.ExpectedStartView(
                at(hours=-0.4 - 0.23 * place), at(hours=-3.6 - 2.1 * place), 41 + place
            ),
            reason=(
                "after job 50" if place else "needs 20G, and at most 12G is free on a GPU now"
            ),
        )  # fmt: skip


def gpu(index: int, **fields: Any) -> machine.GpuView:
    mine = [run for run in RUNS if run.gpu == index]
    leased, used = sum(run.leased for run in mine) * G, int(sum(run.used for run in mine) * G)
    memory = machine.MemoryView(
        TOTAL, used + fields.get("stray", 0), 0, TOTAL, leased, leased, fields.get("stray", 0),
        TOTAL - leased - fields.get("stray", 0),
    )  # fmt: skip
    view = machine.GpuView(
        index, f"GPU-{index}", "NVIDIA A100-PCIE-40GB", "available", None, memory,
        (97, 71, 88, 0)[index], (66, 61, 64, 31)[index], [], label=str(index),
        power=(238.0, 190.0, 226.0, 38.0)[index],
    )  # fmt: skip
    if index == 1:
        view.processes = [
            machine.ProcessView(31056, "eli", "python3", "python3 train_resnet.py", 3 * G, None)
        ]
    if index == 3:
        view.state, view.detail, view.memory.headroom = "drained", "faulty: XID 79", 0
        view.events = [machine.GpuEventView(at(hours=3), "xid 79", "fell off the bus", 2)]
    if index == 0:
        view.kept_for = 50
    return view


def status(rows: int = 20) -> machine.StatusView:
    gpus = [gpu(0), gpu(1, stray=3 * G), gpu(2), gpu(3)]
    queued = list(waiting())
    return machine.StatusView(
        "gpu01", "575.57.08", __version__, False, NOW.isoformat(), gpus,
        [*running(), *queued[:rows]], waiting=len(queued), more="gpulease list",
    )  # fmt: skip


def wandering(seed: object, count: int, low: float, high: float) -> list[int | None]:
    """Return values that change slowly between two bounds."""
    draw = random.Random(str(seed))  # noqa: S311
    value, values = (low + high) / 2, []
    for _ in range(count):
        value = min(high, max(low, value + draw.uniform(-1, 1) * (high - low) / 12))
        values.append(int(value))
    return values


def gpu_history(since: float) -> history.GpuHistoryView:
    count = 288
    owners = [
        history.OwnerSeriesView(
            user, [value if begin <= i < end else 0 for i, value in enumerate(
                wandering(user, count, low * G, high * G))])
        for user, begin, end, low, high in (
            ("ana", 90, 288, 9, 15), ("bob", 20, 270, 6, 11), ("chen", 0, 120, 8, 14),
        )
    ]  # fmt: skip
    used = [sum(owner.used[i] or 0 for owner in owners) for i in range(count)]
    leased = [min(TOTAL, ((value + 7 * G) // (8 * G)) * 8 * G) for value in used]
    return history.GpuHistoryView(
        "GPU-0", "0", "NVIDIA A100-PCIE-40GB", TOTAL, at(seconds=since), since / count,
        list(used), list(leased), list(leased),
        [2 * G if 150 <= i < 170 else 0 for i in range(count)],
        wandering("busy", count, 30, 100), wandering("heat", count, 50, 72),
        wandering("watts", count, 120, 250), owners,
    )  # fmt: skip


def job_memory() -> history.JobMemoryView:
    count = 200
    grown = [int(min(1.0, i / 30) * (value or 0)) for i, value in enumerate(
        wandering("job", count, 10.6 * G, 11.9 * G))]  # fmt: skip
    pool = [int(0.85 * value) for value in grown]
    series = history.JobGpuSeriesView(
        "GPU-0", "0", 16 * G, list(grown), list(pool), wandering("job busy", count, 70, 100)
    )
    return history.JobMemoryView(41, "41", at(hours=3.1), 3.1 * 3600 / count, [series])


HOURS = 3600.0 * G


def shares() -> usage.SharesView:
    users = [
        usage.ShareView("bob", 90 * HOURS, 0.2, 0.7, 16 * G, 1, 6, 1, "50", 31, 640.0, 5400.0),
        usage.ShareView("chen", 130 * HOURS, 0.26, 1.0, 24 * G, 1, 6, 2, "51", 24, 420.0, 3600.0),
        usage.ShareView("ana", 210 * HOURS, 0.4, 1.8, 54 * G, 2, 0, None, None, 18, 95.0, 900.0),
        usage.ShareView("dora", 40 * HOURS, 0.14, 0.5, 8 * G, 1, 5, 3, "52", 52, 210.0, 2400.0),
    ]
    return usage.SharesView("fair", 604800.0, at(days=7), users)


def report() -> usage.ReportView:
    uses = [
        usage.UseView("bob", 44, 2, 380_000.0, 1900 * HOURS, 1310 * HOURS),
        usage.UseView("chen", 23, 0, 210_000.0, 1400 * HOURS, 1290 * HOURS),
        usage.UseView("ana", 16, 1, 520_000.0, 4100 * HOURS, 3350 * HOURS),
        usage.UseView("dora", 61, 0, 90_000.0, 700 * HOURS, 190 * HOURS),
    ]
    return usage.ReportView(None, uses)


def past() -> usage.HistoryView:
    names = ("llm-7b lora", "sweep b=16", "eval", "bert-large")
    found = [
        usage.PastJobView(
            37 - place, str(37 - place), f"{names[place % 4]} s={place}",
            ("bob", "chen", "dora", "ana")[place % 4], "run",
            "time_limit" if place == 5 else "exited", {5: 124, 9: 1, 16: 1}.get(place, 0),
            at(hours=3 + place), at(hours=2.5 + place), at(hours=0.3 + place), 1,
            (20, 24, 6, 32)[place % 4] * G, int((13.2, 21.7, 1.4, 28.9)[place % 4] * G), 80,
            None, None,
        )
        for place in range(30)
    ]  # fmt: skip
    return usage.HistoryView(found)


def doctor() -> machine.DoctorView:
    checks = [
        machine.CheckView("driver", "ok", "575.57.08, NVML 12.575"),
        machine.CheckView("GPU 3", "failure", "drained: faulty: XID 79, fell off the bus",
                          "reset or replace the GPU, then: gpulease resume 3"),
        machine.CheckView("disk", "warning", "/var/lib/gpulease has 2.1G free",
                          "delete files, or set keep_output_for to less"),
        *(machine.CheckView(f"GPU {each} health", "ok", "no known fault") for each in range(3)),
        machine.CheckView("enforcement", "ok", "driver, framework, watch"),
    ]  # fmt: skip
    return machine.DoctorView(checks)


def answer(target: str) -> object:
    """Return what the daemon of the made-up machine would answer."""
    parts = urlsplit(target)
    what = parts.path.removeprefix("/v1/")
    if what.startswith("gpus/"):
        return gpu_history(float(parse_qs(parts.query)["since"][0]))
    views = {
        "status": lambda: status(int(parse_qs(parts.query)["queue"][0])),
        "doctor": doctor, "shares": shares, "report": report, "history": past,
        "jobs/41/memory": job_memory,
        "jobs/41": lambda: next(each for each in running() if each.id == 41),
    }  # fmt: skip
    return views[what]()


class _Daemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = msgspec.json.encode(answer(self.path))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@contextmanager
def served() -> Iterator[str]:
    """Serve the pages of the made-up machine, and yield their address."""
    with tempfile.TemporaryDirectory() as folder, _Daemon(f"{folder}/s", _Handler) as daemon:
        threading.Thread(target=daemon.serve_forever, daemon=True).start()
        reader = DaemonReader(Client(Path(folder, "s")))
        listening = socket.create_server(("127.0.0.1", 0))
        settings = uvicorn.Config(
            build(reader, LiveStatus(reader)), lifespan="off", access_log=False,
            log_level="error", timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()
        reader.close()


def take(browser: Browser, address: str, picture: Picture) -> None:
    width, height = picture.size
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if picture.scheme == "dark" else "light",
    )
    page.goto(address + picture.path)
    if picture.path == "/":
        page.get_by_text("Live.").wait_for()
    page.screenshot(path=FOLDER / f"{picture.name}.png")
    page.close()


def main() -> None:
    """Take all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for picture in PICTURES:
            take(browser, address, picture)
        browser.close()


if __name__ == "__main__":
    main()
