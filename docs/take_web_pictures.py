"""Take the pictures of the web page in docs/web/, with chromium.

The pages and the browser are real. The machine is made up (`made_up_machine`): this script answers
as its daemon.

    python docs/take_web_pictures.py                  # the pictures of the documents
    python docs/take_web_pictures.py --all FOLDER     # each page, in three sizes, light and dark
    python docs/take_web_pictures.py --serve          # until Ctrl-C, on http://127.0.0.1:8080/
"""

import argparse
import fnmatch
import re
import signal
import socket
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import product
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import made_up_machine as made_up
import msgspec
import uvicorn
from playwright.sync_api import Browser, sync_playwright

from gpulease import Client
from gpulease.errors import GpuleaseError, NoSuchGpu, NoSuchRoute
from gpulease.web.app import build
from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.live import LiveStatus
from gpulease.wire import jobs, usage
from gpulease.wire.requests import ErrorBody, ErrorReply
from gpulease.wire.text import has_failed

FOLDER = Path(__file__).parent / "web"
CHROMIUM = "/usr/bin/chromium"
DESK, LAPTOP, PHONE = (1440, 900), (1280, 720), (390, 844)


class Picture(NamedTuple):
    """A picture to take."""

    name: str
    path: str
    size: tuple[int, int] = LAPTOP
    scheme: str = "light"


PICTURES = (
    Picture("now", "/"),
    Picture("now-dark", "/", scheme="dark"),
    Picture("now-phone", "/", PHONE),
    Picture("jobs", "/jobs"),
    Picture("past", "/past"),
    Picture("job", "/jobs/41"),
    Picture("gpu", "/gpus/5?span=day"),
    Picture("user", "/users/mei"),
    Picture("people", "/people"),
    Picture("health", "/health"),
)
PAGES = {
    "now": "/", "jobs": "/jobs", "user": "/users/mei", "past": "/past", "job-ended": "/jobs/41",
    "job-running": "/jobs/175", "job-waiting": "/jobs/201", "array": "/jobs/190",
    "gpu": "/gpus/5?span=day", "gpu-drained": "/gpus/6", "people": "/people", "health": "/health",
    "missing": "/jobs/9999",
}  # fmt: skip


def answer(target: str) -> object:
    """Return what the daemon of the made-up machine would answer."""
    parts = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    path = parts.path.removeprefix("/v1/")
    for pattern, view in ROUTES:
        if found := re.fullmatch(pattern, path):
            return view(query, *found.groups())
    raise NoSuchRoute(f"no route {path}")


def machine_status(query: Mapping[str, str]) -> object:
    rows = query.get("queue", "all")
    return made_up.status(None if rows == "all" else int(rows))


def past(query: Mapping[str, str]) -> usage.HistoryView:
    """Return a page of the jobs that have ended."""
    outcome, limit = query.get("outcome"), int(query["limit"])
    found = [
        job
        for job in map(made_up.past, range(made_up.PAST, 0, -1))
        if job.id < int(query.get("before", made_up.PAST + 1))
        if job.user == query.get("user", job.user)
        if fnmatch.fnmatch(job.name, query.get("name", "*"))
        if outcome is None or (has_failed(job) if outcome == "failed" else job.outcome == outcome)
    ]
    return usage.HistoryView(found[:limit], found[limit - 1].id if len(found) > limit else None)


def gpu_history(query: Mapping[str, str], label: str) -> object:
    if int(label) >= made_up.GPUS:
        raise NoSuchGpu(f"no GPU {label}")
    return made_up.gpu_history(int(label), float(query["since"]), int(query["points"]))


ROUTES: tuple[tuple[str, Callable[..., object]], ...] = (
    ("status", machine_status),
    ("doctor", lambda _: made_up.doctor()),
    ("shares", lambda _: made_up.shares()),
    ("report", lambda _: made_up.report()),
    ("history", past),
    ("jobs", lambda query: jobs.JobList(made_up.elements(int(query["array"])))),
    (r"jobs/(\d+)", lambda _, number: made_up.one(int(number))),
    (r"jobs/(\d+)/memory", lambda _, number: made_up.job_memory(int(number))),
    (r"gpus/(\d+)/history", gpu_history),
)


class _Daemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        try:
            status, view = 200, answer(self.path)
        except GpuleaseError as error:
            status = error.http_status
            view = ErrorReply(ErrorBody(error.code, error.message, error.hint))
        body = msgspec.json.encode(view)
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@contextmanager
def served(port: int = 0) -> Iterator[str]:
    """Serve the pages of the made-up machine, and yield their address."""
    with tempfile.TemporaryDirectory() as folder, _Daemon(f"{folder}/s", _Handler) as daemon:
        threading.Thread(target=daemon.serve_forever, daemon=True).start()
        reader = DaemonReader(Client(Path(folder, "s")))
        listening = socket.create_server(("127.0.0.1", port))
        settings = uvicorn.Config(
            build(reader, LiveStatus(reader)), lifespan="off", access_log=False,
            log_level="error", timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            reader.close()


def take(browser: Browser, address: str, folder: Path, picture: Picture) -> None:
    width, height = picture.size
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if picture.scheme == "dark" else "light",
    )
    page.goto(address + picture.path)
    if picture.path == "/":
        page.get_by_text("Live").first.wait_for()
    page.screenshot(path=folder / f"{picture.name}.png")
    page.close()


def every_picture() -> Iterator[Picture]:
    """Yield each page in each size and scheme."""
    for (name, path), size, scheme in product(
        PAGES.items(), (DESK, LAPTOP, PHONE), ("light", "dark")
    ):
        yield Picture(f"{name}-{size[0]}-{scheme}", path, size, scheme)


def main() -> None:
    """Take the pictures, or serve the pages until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    with served(8080 if given.serve else 0) as address:
        if given.serve:
            sys.stderr.write(f"{address}\n")
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
            return
        folder: Path = given.all or FOLDER
        folder.mkdir(exist_ok=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for picture in every_picture() if given.all else PICTURES:
                take(browser, address, folder, picture)
            browser.close()


if __name__ == "__main__":
    main()
