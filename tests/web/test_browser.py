"""The page in a real browser: drawn, live, readable for everyone, and without scripts."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from daemon_rig import PATIENCE_S, Daemon, wait_for
from gpulease.peer_credentials import user_name
from gpulease.web.live import ON_PHONE
from web.conftest import GPUS, ROWS
from web.rig import Web
from web.test_own_jobs import own_web

CHROMIUM = Path("/usr/bin/chromium")
AXE = "4.11.0"
PAGES = (
    "/", "/jobs", "/jobs?page=20", "/jobs?user=x&name=net", "/users/root", "/jobs/1", "/jobs/100",
    "/gpus/0", "/gpus/15", "/gpus/0?span=year", "/people", "/health", "/past", "/jobs/99999",
)  # fmt: skip

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield Debian's chromium."""
    if not CHROMIUM.exists():
        pytest.skip("needs chromium: apt install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Yield what opens a page; no page may have written an error to its console."""
    said: list[str] = []
    contexts = []

    def open_(url: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda line: said.append(line.text) if line.type in _LOUD else None)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    # Chromium reports pages that are answers to a missing job, or to a daemon that is away.
    assert not [line for line in said if "responded with a status of" not in line], said


_LOUD = ("error", "warning")


@pytest.fixture(scope="session")
def axe() -> str:
    """Return axe-core, which npm installs once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = cache / "gpulease-tests" / f"axe-core-{AXE}.js"
    if not kept.exists():
        if shutil.which("npm") is None:
            pytest.skip("needs npm, to install axe-core")
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            line = ["npm", "install", "--silent", "--prefix", folder, f"axe-core@{AXE}"]
            done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
            if done.returncode != 0:
                pytest.skip(f"npm cannot install axe-core: {done.stderr[-200:]}")
            found = Path(folder) / "node_modules" / "axe-core" / "axe.min.js"
            shutil.copy(found, kept.with_suffix(f".{os.getpid()}"))
        kept.with_suffix(f".{os.getpid()}").replace(kept)
    return kept.read_text()


def faults(page: Page, axe: str) -> list[str]:
    """Return the serious and critical accessibility faults of a page."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['html'][:150]} {json.dumps(node['any'][:1])[:300]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.parametrize(
    ("scheme", "paths"), [("light", PAGES), ("dark", ("/", "/jobs/1", "/gpus/0"))]
)
def test_each_page_is_accessible_with_16_gpus_and_2000_jobs(
    busy_web: Web, open_page: Open, axe: str, scheme: str, paths: tuple[str, ...]
) -> None:
    page = open_page(busy_web.url, color_scheme=scheme)
    found = {}
    for path in paths:
        page.goto(busy_web.url + path)
        assert page.locator("h1").count() == 1, path
        assert page.locator("main").inner_text(), path
        found[path] = faults(page, axe)
    assert not any(found.values()), found


def test_a_phone_scrolls_no_page_sideways(busy_web: Web, open_page: Open) -> None:
    page = open_page(busy_web.url, viewport={"width": 390, "height": 844}, is_mobile=True)
    broken = "[...document.querySelectorAll('tbody th a, .line, .short')].filter("
    broken += "each => each.getClientRects().length > 1).map(each => each.textContent)"
    for path in PAGES:
        page.goto(busy_web.url + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        assert page.evaluate("document.documentElement.clientWidth") == 390, path
        assert page.evaluate(broken) == [], path


@pytest.mark.parametrize("width", [390, 768, 1280, 1440, 1920])
def test_the_reason_of_a_waiting_job_is_read_to_its_end(
    busy_web: Web, open_page: Open, width: int
) -> None:
    page = open_page(busy_web.url, viewport={"width": width, "height": 900})
    reasons = "[...document.querySelectorAll('#queue .text')].filter(each => each.offsetParent)"
    assert len(page.evaluate(f"{reasons}.map(each => each.textContent)")) >= ON_PHONE
    assert page.evaluate(f"{reasons}.filter(each => each.scrollWidth > each.clientWidth)") == []


def test_a_phone_has_the_user_beside_the_name(busy_web: Web, open_page: Open) -> None:
    page = open_page(f"{busy_web.url}/jobs", viewport={"width": 390, "height": 844}, is_mobile=True)
    for row in page.get_by_label("Queue").locator("tbody tr").all()[:5]:
        name, user = (row.locator(f"{each}:visible").bounding_box() for each in (".name", ".user"))
        assert name is not None and user is not None
        assert abs(name["y"] - user["y"]) < name["height"]


def test_a_phone_shows_the_first_rows_of_the_machine_and_leads_to_all(
    busy_web: Web, open_page: Open
) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}
    page = open_page(busy_web.url, java_script_enabled=False, **phone)
    for section in ("#jobs", "#queue"):
        rows = page.locator(f"{section} tbody tr")
        assert sum(row.is_visible() for row in rows.all()) == ON_PHONE
    page.get_by_role("link", name=f"All {GPUS - 1} running jobs").click()
    assert page.locator("tbody tr:visible").count() == GPUS - 1


def test_the_machine_is_shown_as_it_is(busy_web: Web, open_page: Open) -> None:
    page = open_page(busy_web.url)
    assert page.locator("#gpus .gpus > li").count() == GPUS
    assert page.locator("#jobs tbody tr").count() == GPUS - 1
    assert f"{ROWS} waiting" in page.locator("#machine").inner_text()
    assert "new fan" in page.locator("#gpus").inner_text()
    page.get_by_role("link", name=f"All {ROWS} waiting jobs").click()
    assert page.locator("tbody tr").count() == 100
    page.get_by_role("link", name="Next").click()
    assert "Rows 101 to 200" in page.locator("main").inner_text()


def test_a_job_is_seen_and_the_focus_stays(daemon: Daemon, served: Web, open_page: Open) -> None:
    page = open_page(served.url)
    page.get_by_text("Live.").wait_for()
    page.locator("#gpus a").last.focus()
    job = daemon.submit("--mem", "1G", "--name", "fresh", "sleep", "600")
    daemon.wait_until(job, "active")
    page.locator("#jobs").get_by_text("fresh").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "GPU 1"
    daemon.cancel(job)
    page.get_by_text("No job runs.").wait_for()


def test_rows_come_and_go_in_the_order_of_the_server(
    daemon: Daemon, served: Web, open_page: Open
) -> None:
    page = open_page(served.url)
    jobs = [daemon.submit("--mem", "1G", "sleep", "600") for _ in range(5)]
    for gone in (jobs[0], jobs[2], jobs[4]):
        daemon.cancel(gone)
        jobs.remove(gone)
        _rows_are(page, jobs)
    jobs.append(daemon.submit("--mem", "1G", "sleep", "600"))
    _rows_are(page, jobs)
    page.reload()
    _rows_are(page, jobs)


def _rows_are(page: Page, jobs: list[int]) -> None:
    rows = [f"job-{job}" for job in jobs]
    script = "[...document.querySelectorAll('#jobs tbody tr')].map(row => row.id)"
    wait_for(f"the rows are {rows}", lambda: page.evaluate(script) == rows)


@pytest.mark.parametrize("path", ["/", "/jobs"])
def test_a_page_that_is_paused_stays_and_then_goes_on(
    daemon: Daemon, served: Web, open_page: Open, path: str
) -> None:
    page = open_page(served.url + path)
    page.get_by_text("Live.").wait_for()
    page.get_by_role("button", name="Pause updates").click()
    daemon.wait_until(daemon.submit("--mem", "1G", "--name", "later", "sleep", "600"), "active")
    page.get_by_text("Paused at").wait_for()
    assert page.get_by_text("later").count() == 0
    page.get_by_role("button", name="Resume updates").click()
    page.get_by_text("later").wait_for()


def test_a_daemon_that_goes_away_is_a_notice_until_it_is_back(
    daemon: Daemon, served: Web, open_page: Open
) -> None:
    page = open_page(served.url)
    page.get_by_text("Live.").wait_for()
    daemon.kill()
    page.get_by_text("cannot reach the daemon").wait_for()
    assert page.get_by_text("Live.").count() == 0
    assert page.get_by_text("Not live").count() == 1
    assert re.search(r"those of \d\d:\d\d:\d\d", page.locator("#notice").inner_text())
    assert page.locator("#gpus .gpus > li").count() == 2, "what was known stays"
    daemon.start()
    page.get_by_text("cannot reach the daemon").wait_for(state="detached")
    page.get_by_text("Live.").wait_for()


def test_an_error_page_becomes_the_page_when_the_daemon_is_back(
    daemon: Daemon, served: Web, open_page: Open
) -> None:
    daemon.kill()
    page = open_page(f"{served.url}/people")
    assert "cannot reach the daemon" in page.locator("main").inner_text()
    daemon.start()
    page.get_by_role("heading", name="People").wait_for()


def test_without_scripts_the_page_shows_the_machine_and_says_how_to_reload(
    daemon: Daemon, served: Web, open_page: Open
) -> None:
    daemon.wait_until(daemon.submit("--mem", "1G", "--name", "plain", "sleep", "600"), "active")
    page = open_page(served.url, java_script_enabled=False)
    assert page.get_by_text("plain").is_visible()
    assert page.get_by_role("button").all_text_contents() == ["Find"]
    daemon.wait_until(daemon.submit("--mem", "1G", "--name", "successor", "sleep", "600"), "active")
    # The server shows a state that may be half a second old.
    wait_for("it is served", lambda: "successor" in served.get("/").text)
    page.get_by_role("link", name="Reload").click()
    page.get_by_text("successor").wait_for()


def test_keys_alone_lead_to_everything(busy_web: Web, open_page: Open) -> None:
    page = open_page(busy_web.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "pause"


def test_the_history_of_a_gpu_has_axes_and_owners(
    daemon: Daemon, served: Web, open_page: Open
) -> None:
    program = "held = bytearray(300 << 20); import time; time.sleep(600)"
    job = daemon.submit("--mem", "1G", "python3", "-c", program)
    gpu = daemon.wait_until(job, "active")["leases"][0]["gpu"]
    wait_for("it is recorded", lambda: any(daemon.client.gpu_history(gpu).used))
    page = open_page(f"{served.url}/gpus/{gpu}")
    plot = page.locator(".plot").first
    assert plot.locator("path.used").count() == 1
    assert {"2G", "4G", "6G", "8G"} <= set(plot.locator(".ys text").all_text_contents())
    assert len(plot.locator(".area text").all_text_contents()) >= 3
    for span in ("Week", "Year"):
        page.get_by_role("link", name=span).click()
        assert page.get_by_role("link", name=span).get_attribute("aria-current") == "true"
        html = served.get(page.url.removeprefix(served.url)).text
        written = re.findall(r'data-at="\d+">(\w{3} \d\d)<', html)
        shown = page.locator("text[data-at]").all_text_contents()
        assert shown == written != [], "the script keeps the days, in the same zone"


def test_a_user_confirms_in_a_browser_and_reads_output_as_it_is_written(
    open_page: Open, daemon: Daemon, tmp_path: Path, axe: str
) -> None:
    flag = tmp_path / "go"
    wait = f"echo first; while [ ! -e {flag} ]; do sleep 0.1; done; echo second; sleep 600"
    number = daemon.submit("--mem", "1G", "sh", "-c", wait)
    daemon.wait_until(number, "active")
    with own_web(daemon, tmp_path, "--open") as own:
        page = open_page(f"http://127.0.0.1:{own.port}/jobs/{number}")
        page.get_by_role("link", name="Output").click()
        page.locator("#output", has_text="first").wait_for()
        flag.touch()
        page.locator("#output", has_text="second").wait_for()
        assert faults(page, axe) == []
        page.get_by_role("link", name="Back to the job").click()
        page.get_by_role("link", name="Cancel").click()
        assert faults(page, axe) == []
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text(f"job {number} is ending").wait_for()
        # It goes on to follow the job: without its server, that would be an error.
        page.close()
    daemon.wait_until(number, "ended")


def test_a_chart_says_its_values_under_the_pointer_and_by_keyboard_and_is_zoomed(
    daemon: Daemon, served: Web, open_page: Open, axe: str
) -> None:
    program = "held = bytearray(300 << 20); import time; time.sleep(600)"
    daemon.wait_until(daemon.submit("--mem", "1G", "python3", "-c", program), "active")
    wait_for("it is recorded", lambda: any(daemon.client.gpu_history("0").used))
    page = open_page(f"{served.url}/gpus/0")
    plot = page.locator(".plot").first
    plot.focus()
    page.keyboard.press("End")
    said = page.locator(".chart output").first
    assert re.match(r"\d\d:\d\d: .*leased \S+, all memory 8G$", said.inner_text())
    assert plot.get_attribute("aria-valuetext") == said.inner_text()
    page.keyboard.press("Home")
    assert said.inner_text().endswith(": not recorded"), "an hour ago there was no daemon"
    assert faults(page, axe) == []
    _drag_over_half(page)
    page.wait_for_url("**/gpus/0?from=*")
    asked = {name: int(value) for name, value in re.findall(r"(from|to)=(\d+)", page.url)}
    assert 1700 < asked["to"] - asked["from"] < 1900, "half of the hour"
    page.goto(f"{served.url}/jobs/1")
    marks = page.locator(".plot").first.locator("text[data-at]").all_text_contents()
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", each) for each in marks), marks
    assert len(marks) == len(set(marks)) > 0
    _drag_over_half(page)
    page.wait_for_url("**/jobs/1?from=*")
    page.get_by_role("link", name="All of it").click()
    page.wait_for_url(re.compile(r"/jobs/1\?$"))
    page.goto(f"{served.url}/users/{user_name(os.geteuid())}")
    _drag_over_half(page)
    page.wait_for_url("**/users/*?from=*")
    page.get_by_role("link", name="All of it").click()
    page.wait_for_url(re.compile(r"/users/\w+\?$"))


def _drag_over_half(page: Page) -> None:
    box = page.locator(".area").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 50)
    page.mouse.up()


def test_the_page_of_a_job_follows_it_to_its_end(
    daemon: Daemon, served: Web, open_page: Open, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    wait = f"until [ -e {stop} ]; do sleep 0.05; done; exit 3"
    job = daemon.submit("--mem", "1G", "sh", "-c", wait)
    daemon.wait_until(job, "active")
    page = open_page(f"{served.url}/jobs/{job}")
    assert "Runs on GPU" in page.locator(".lead").inner_text()
    page.get_by_text(f"gpulease logs -f {job}").wait_for()
    stop.touch()
    page.get_by_text("exited with 3").first.wait_for()
    page.get_by_text(f"gpulease again {job}").wait_for()


def test_jobs_are_found_by_number_user_gpu_and_name(busy_web: Web, open_page: Open) -> None:
    page = open_page(busy_web.url)
    for asked, address in (
        ("3", "/jobs/3"), ("gpu 4", "/gpus/4"), ("net 7", "/jobs?name=net+7"),
    ):  # fmt: skip
        page.get_by_role("search").get_by_role("textbox").fill(asked)
        page.keyboard.press("Enter")
        page.wait_for_url(busy_web.url + address)
    assert page.locator("tbody tr").count() == 1
    page.get_by_label("State").select_option("waiting")
    page.get_by_label("Name", exact=True).fill("sweep 19")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/jobs?state=waiting**")
    assert page.locator("tbody tr").count() == 100
    page.get_by_role("link", name="Next").click()
    assert page.locator("tbody tr").count() == 11, "19, 190 to 199 and 1900 to 1999"


def test_times_are_in_the_zone_of_the_viewer(daemon: Daemon, served: Web, open_page: Open) -> None:
    job = daemon.submit("--mem", "1G", "sleep", "600")
    daemon.wait_until(job, "active")
    page = open_page(f"{served.url}/jobs/{job}", timezone_id="Asia/Kolkata")
    began = page.locator("time[data-ago]").first
    at = datetime.fromisoformat(began.get_attribute("datetime") or "")
    there = at.astimezone(ZoneInfo("Asia/Kolkata"))
    assert re.search(rf"\b{there:%H:%M}, under a minute ago|1 min ago", began.inner_text())
    assert "Asia/" in page.locator("#zone").inner_text()
