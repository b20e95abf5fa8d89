"""The page over HTTP: what it refuses, what it shows to whom, and what it says when it cannot."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode, urljoin, urlsplit

import pytest

from daemon_rig import PATIENCE_S, Daemon, open_folder, wait_for
from e2e.users import OTHER, STRANGER, call, daemon_for_all, job, needs_root
from gpulease.peer_credentials import user_name
from web.rig import Web, web

PAGES = ("/", "/jobs", "/past", "/jobs/1", "/gpus/0", "/people", "/health")


def crawled(served: Web, start: str = "/") -> dict[str, str]:
    """Return the text of each page and file that links lead to."""
    found: dict[str, str] = {}
    ahead = [start]
    while ahead:
        path = ahead.pop()
        if path in found:
            continue
        reply = served.get(path)
        assert reply.status == 200, path
        found[path] = reply.text
        for target in re.findall(r'(?:href|src|data-events)="([^"#]*)"', reply.text):
            joined = urlsplit(urljoin(served.url + path, unescape(target)))
            assert joined.netloc == f"{served.host}:{served.port}", target
            # Each range of time has links to others, without an end.
            is_deeper = "from=" in path and "from=" in joined.query
            if joined.path != "/events" and not is_deeper:
                ahead.append(joined.path + (f"?{joined.query}" if joined.query else ""))
    return found


def event(served: Web) -> str:
    """Return the first piece of the event stream."""
    with served.open("/events") as reply:
        text = b""
        while b"event: queue" not in text:
            text += reply.read1()
    return text.decode()


def test_all_links_lead_to_pages_that_are_there(daemon: Daemon, served: Web) -> None:
    daemon.wait_until(daemon.submit("--mem", "1G", "sleep", "600"), "active")
    found = crawled(served)
    assert set(PAGES) <= set(found)
    assert "/gpus/1?span=year" in found
    assert "/static/live.js" in found


def test_nothing_can_be_changed_and_nothing_is_remembered(daemon: Daemon, served: Web) -> None:
    for path in (*PAGES, "/events", "/static/style.css", "/nothing"):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"):
            reply = served.get(path, method)
            assert reply.status == 405, (method, path)
            assert reply.headers["allow"] == "GET, HEAD"
        head = served.get(path, "HEAD")
        assert (head.text, head.status in (200, 404)) == ("", True), path
        assert "set-cookie" not in head.headers


def test_every_answer_forbids_what_the_page_does_not_need(served: Web) -> None:
    for path in (*PAGES, "/static/live.js", "/nothing", "/jobs/5"):
        headers = served.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert "server" not in headers


def test_a_name_that_is_not_of_this_machine_is_refused(daemon: Daemon) -> None:
    with web(daemon.socket, "--host", "gpu.example.org") as served:
        refused = served.get("/", Host="rebound.example")
        assert (refused.status, "--host" in refused.text) == (421, True)
        assert served.get("/", Host="gpu.example.org").status == 200
        assert served.get("/", Host=f"localhost:{served.port}").status == 200


def test_no_page_has_script_or_style_of_its_own(daemon: Daemon, served: Web) -> None:
    daemon.wait_until(daemon.submit("--mem", "1G", "sleep", "600"), "active")
    for path, text in crawled(served).items():
        if not path.startswith("/static/"):
            assert not re.search(r"<style|<script(?! src=)|\sstyle=|\son\w+=|javascript:", text), (
                path
            )
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), path


def test_files_are_asked_for_again_and_sent_once(served: Web) -> None:
    first = served.get("/static/style.css")
    again = served.get("/static/style.css", **{"if-none-match": first.headers["etag"]})
    assert (again.status, again.text) == (304, "")
    assert served.get("/static/../main.py").status == 404
    assert served.get("/static/%2e%2e/main.py").status == 404


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}",
    "</title><svg onload=alert(1)>",
)


def test_names_and_commands_of_users_are_text_wherever_they_are(
    daemon: Daemon, served: Web
) -> None:
    for name in HOSTILE:
        words = ("sh", "-c", "sleep 600", name, "\u202eevil\x1b[31m\n")
        daemon.wait_until(daemon.submit("--mem", "1G", "--name", name, *words), "active")
    daemon.submit("--mem", "8G", "--gpus", "2", "--name", HOSTILE[0], "sleep", "600")
    wait_for("one waits", lambda: daemon.client.status().waiting)
    # The page shows a state that may be a second old.
    wait_for(
        "the page shows them",
        lambda: all(name in unescape(served.get("/").text) for name in HOSTILE),
    )
    texts = crawled(served)
    texts["/events"] = event(served)
    for path, text in texts.items():
        if path.startswith("/static/"):
            continue
        assert "alert(1)</script>" not in text, path
        assert not re.search(r"<(img|svg on)", text), path
        assert not {"\u202e", "\x1b"} & set(text), path
        for tag in re.findall(r"<[a-z][^>]*>", text):
            assert "alert" not in unescape(tag) or "aria-label" in tag, (path, tag)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in texts["/"]
    assert "{{ 7 * 7 }}" in texts["/"]


def test_what_is_missing_is_said_to_be_missing(served: Web) -> None:
    for path in (
        "/jobs/4711", "/jobs/x", f"/jobs/{1 << 70}", "/gpus/7", "/gpus/%3Cb%3E", "/x/y/z",
        "/users/nobody",
    ):  # fmt: skip
        reply = served.get(path)
        assert reply.status == 404, path
        assert "<b>" not in reply.text
        assert "refresh" not in reply.headers, path
        assert (
            served.get(urljoin(path, re.findall(r'href="([^"]*style.css)"', reply.text)[0])).status
            == 200
        )
    for path in ("/jobs?page=0", "/jobs?page=999999999999999999999", "/people?span=eon"):
        assert served.get(path).status == 200, path


def test_the_search_leads_to_what_people_type(daemon: Daemon, served: Web) -> None:
    daemon.wait_until(daemon.submit("--mem", "1G", "true"), "ended")
    newest = daemon.submit("--mem", "1G", "--name", "GPU 2 test", "sleep", "600")
    uuid = daemon.client.status().gpus[1].uuid
    for asked, target in (
        ("1", "jobs/1"), ("#1", "jobs/1"), ("job 1", "jobs/1"), ("1_3", "jobs/1_3"),
        ("last", f"jobs/{newest}"), ("GPU 1", "gpus/1"), ("gpu9", "gpus/9"),
        (uuid, f"gpus/{uuid}"), (uuid[:-1], f"gpus/{uuid[:-1]}"),
        ("GPU-ffffffff", "jobs?name=GPU-ffffffff"), ("GPU 2 test", "jobs?name=GPU+2+test"),
    ):  # fmt: skip
        reply = served.get(f"/find?{urlencode({'q': asked})}")
        assert (reply.status, reply.headers["location"]) == (303, target), asked
    assert "<h1>GPU 1 " in served.get(f"/gpus/{uuid[:-1]}").text
    assert "no GPU" in served.get("/gpus/9").text
    assert "no user nobody has used this machine" in served.get("/users/nobody").text


def test_lists_say_which_user_or_gpu_is_not_known(daemon: Daemon, served: Web) -> None:
    daemon.wait_until(daemon.submit("--mem", "1G", "true"), "ended")
    for path, said, option in (
        ("/jobs?user=nosuch", "no user nosuch has used this machine", "nosuch"),
        ("/past?user=nosuch", "no user nosuch has used this machine", "nosuch"),
        ("/find?q=nosuch", "no user nosuch has used this machine", None),
        ("/jobs?gpu=9", "no GPU named '9'", "9"),
    ):
        reply = served.get(path)
        if reply.status == 303:
            reply = served.get("/" + reply.headers["location"])
        text = unescape(reply.text)
        assert (reply.status, said in text) == (200, True), path
        # The form shows the filter that it would send again.
        assert option is None or f'<option value="{option}" selected>' in text, path
    user = user_name(os.geteuid())
    for path in (f"/jobs?user={user}", f"/past?user={user}&end=lost", "/jobs?gpu=1", "/jobs"):
        text = unescape(served.get(path).text)
        assert not re.search("no user|no GPU", text), path


def test_the_charts_of_a_job_show_a_part_of_its_time(daemon: Daemon, served: Web) -> None:
    job = daemon.submit("--mem", "1G", "sleep", "600")
    daemon.wait_until(job, "active")
    wait_for("it is recorded", lambda: 'class="chart"' in served.get(f"/jobs/{job}").text)
    assert "part of its time" not in served.get(f"/jobs/{job}").text
    now = int(time.time())
    part = served.get(f"/jobs/{job}?from={now - 60}&to={now}").text
    assert "This is a part of its time." in part
    assert 'class="chart"' in part
    assert served.get(f"/jobs/{job}?from={now - 7200}&to={now - 3600}").status == 200


def test_an_ended_job_shows_what_it_needed_and_how_it_ended(daemon: Daemon, served: Web) -> None:
    job = daemon.submit("--mem", "1G", "sh", "-c", "exit 2")
    daemon.wait_until(job, "ended")
    shown = served.get(f"/jobs/{job}").text
    assert "exited with 2" in shown
    assert f"gpulease again {job}" in shown
    assert "worker-started" in shown
    assert ">Peak<" in shown
    assert ">Uses<" not in shown
    assert ">exited<" in served.get("/past").text


def test_a_daemon_that_is_away_gives_a_page_that_recovers(daemon: Daemon, served: Web) -> None:
    daemon.kill(signal.SIGTERM)
    gone = wait_for(
        "it is away",
        lambda: next((reply for path in PAGES if (reply := served.get(path)).status == 503), None),
    )
    assert "cannot reach the daemon" in gone.text
    assert gone.headers["refresh"] == "5"
    assert "--socket" not in gone.text, "that is for the command"
    daemon.start()
    wait_for("it is back", lambda: all(served.get(path).status in (200, 404) for path in PAGES))


def test_a_daemon_that_does_not_answer_gives_a_page_that_says_so(
    daemon: Daemon, served: Web
) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        reply = served.get("/people")
        assert (reply.status, reply.headers["refresh"]) == (503, "5")
        assert "does not answer" in reply.text
        assert served.get("/static/style.css").status == 200
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    wait_for("it answers", lambda: served.get("/people").status == 200)


def test_it_starts_before_the_daemon() -> None:
    with open_folder() as folder, web(folder / "s") as served:
        assert served.get("/").status == 503
        made = Daemon(folder).start()
        try:
            wait_for("the page", lambda: served.get("/").status == 200)
        finally:
            made.end_all()


def test_more_requests_than_a_slow_daemon_answers_are_refused_at_once() -> None:
    with open_folder() as folder:
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(str(folder / "s"))
        (folder / "s").chmod(0o666)
        silent.listen(100)
        with silent, web(folder / "s") as served:
            waiting = []
            for number in range(1, 33):
                made = HTTPConnection(served.host, served.port, timeout=120)
                made.request("GET", f"/jobs/{number}")
                waiting.append(made)
            refused = wait_for("too many wait", lambda: _refused(served))
            assert "too many requests wait" in refused
            assert served.get("/static/style.css").status == 200
            for each in waiting:
                each.close()


def _refused(served: Web) -> str | None:
    made = HTTPConnection(served.host, served.port, timeout=1)
    try:
        made.request("GET", "/jobs/99")
        reply = made.getresponse()
        return reply.read().decode() if reply.status == 503 else None
    except TimeoutError:
        return None
    finally:
        made.close()


@contextmanager
def proxy(served: Web, *, strips: bool) -> Iterator[str]:
    """Run a reverse proxy under /deep/path, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path.startswith("/deep/path/"), self.path
            path = self.path.removeprefix("/deep/path") if strips else self.path
            with served.open(path) as reply:
                content = b"" if path.endswith("/events") else reply.read()
                self.send_response(reply.status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/deep/path/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("strips", [True, False])
def test_it_works_under_the_path_of_a_proxy(daemon: Daemon, strips: bool) -> None:
    daemon.wait_until(daemon.submit("--mem", "1G", "sleep", "600"), "active")
    base = () if strips else ("--base", "/deep/path/")
    with web(daemon.socket, *base) as served, proxy(served, strips=strips) as address:
        parts = urlsplit(address)
        outside = Web(served.process, parts.hostname or "", parts.port or 0)
        found = crawled(outside, parts.path)
        assert {f"/deep/path{each}" for each in PAGES} <= set(found)
        assert "/deep/path/static/live.js" in found


def test_a_base_needs_no_slash_and_nothing_leads_out_of_it(daemon: Daemon) -> None:
    with web(daemon.socket, "--base", "/deep/path") as served:
        reply = served.get("/deep/path")
        assert (reply.status, reply.headers["location"]) == (307, "/deep/path/")
        assert served.get("/deep/path/queue/").status == 404
        assert served.get("/deep/path/jobs/").status == 404


def test_a_long_path_has_a_short_answer(served: Web) -> None:
    reply = served.get("/" * 50_000)
    assert reply.status == 414
    assert len(reply.text) < 100


@needs_root
def test_what_an_admin_hides_is_in_no_answer() -> None:
    secret = "4711-secret"
    with daemon_for_all(hide_commands="true") as daemon:
        for order in (
            job("sh", "-c", f"sleep 600; : {secret}", memory=1 << 30, name="plain"),
            job("sh", "-c", f"sleep 600; : {secret}", memory=1 << 30, name=secret),
            job("sleep", secret, memory=1 << 30, queue={"held": True}),
            job("sh", "-c", f"exit 3; : {secret}", memory=1 << 30),
        ):
            assert call(daemon, OTHER, "POST", "/v1/jobs", order)[0] == 201
        daemon.wait_until(1, "active")
        daemon.wait_until(4, "ended")
        with web(daemon.socket, uid=STRANGER) as served:
            texts = crawled(served)
            assert {"/past", "/jobs/1", "/jobs/2", "/jobs/3", "/jobs/4"} <= set(texts)
            texts["/events"] = event(served)
            texts["/metrics"] = served.get("/metrics?jobs=1").text
            assert "(hidden)" in texts["/"]
            assert str(OTHER) in texts["/"]
            assert [path for path, text in texts.items() if secret in text] == []


@needs_root
def test_as_a_user_who_sees_what_is_hidden_it_shows_nothing() -> None:
    with daemon_for_all(hide_commands="true", admins="nogroup") as daemon:
        daemon.wait_until(daemon.submit("--mem", "1G", "sleep", "4711"), "active")
        with web(daemon.socket) as served:
            for path in PAGES:
                reply = served.get(path)
                assert reply.status == 403, path
                assert "runs as an admin" in reply.text
                assert "4711" not in reply.text


@needs_root
def test_it_does_not_start_as_root() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpulease.web"], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 78
    assert "as root" in done.stderr


def test_it_listens_on_a_unix_socket_and_ends_at_a_signal(daemon: Daemon) -> None:
    with tempfile.TemporaryDirectory(prefix="gpulease-web-") as name:
        Path(name).chmod(0o777)
        for _ in range(2):  # what a killed process leaves is no obstacle
            with web(daemon.socket, "--listen", f"unix:{name}/web") as served:
                assert "GPUs" in served.get("/").text
                with served.open("/events") as reply:
                    reply.read1()
                    served.process.terminate()
                    assert served.process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
