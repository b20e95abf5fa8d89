"""`gpulease web`: who reaches it, what its forms do, and what it refuses."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest

from daemon_rig import PATIENCE_S, Daemon, open_folder, wait_for
from e2e.users import OTHER, call, daemon_for_all, job, needs_root
from goldens import mentions
from web.rig import Reply

_WHERE = re.compile(r"ssh -L 8080:(\S+) |http://([\d.]+):(\d+)/")


class Own:
    """A `gpulease web` that runs."""

    def __init__(self, daemon: Daemon, runtime: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpulease.cli", "web", "--socket", str(daemon.socket), *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "BROWSER": "true"},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        found = _WHERE.search(self.said)
        assert found, self.said
        self.path, self.port = found[1], int(found[3] or 0)

    def ask(
        self, path: str, form: dict[str, str] | None = None, origin: str | None = "http://localhost",
        host: str = "localhost",
    ) -> Reply:  # fmt: skip
        """Get a page, or send a form as a browser does that came from `origin`."""
        made = HTTPConnection("127.0.0.1", self.port or 80, timeout=PATIENCE_S)
        if self.path is not None:
            made.sock = socket.socket(socket.AF_UNIX)
            made.sock.connect(self.path)
        headers = {"host": host}
        if form is not None:
            headers |= {"content-type": "application/x-www-form-urlencoded"}
            headers |= {} if origin is None else {"origin": origin}
        body = None if form is None else urlencode(form)
        made.request("GET" if form is None else "POST", path, body, headers)
        reply = made.getresponse()
        text = unescape(reply.read().decode())
        made.close()
        names = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, names, text)

    def token(self, path: str) -> str:
        """Return the token in the form of a page."""
        found = re.search(r'name="token" value="([^"]+)"', self.ask(path).text)
        assert found, path
        return found[1]

    def confirm(self, path: str, **fields: str) -> Reply:
        """Do what a user does: open the page of an action, and send its form."""
        return self.ask(path, {"token": self.token(path), **fields})

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def own_web(daemon: Daemon, runtime: Path, *options: str) -> Iterator[Own]:
    started = Own(daemon, runtime, *options)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def own(daemon: Daemon, tmp_path: Path) -> Iterator[Own]:
    """Yield the page of the user of the tests, on its Unix socket."""
    with own_web(daemon, tmp_path) as started:
        yield started


def test_only_its_user_can_open_its_socket(daemon: Daemon, tmp_path: Path) -> None:
    with own_web(daemon, tmp_path) as first:
        path = Path(first.path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        line = [sys.executable, "-m", "gpulease.cli", "web", "--socket", str(daemon.socket)]
        again = subprocess.run(
            line, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True,
            text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert again.returncode == 125
        assert "you serve them already" in again.stderr
        assert first.ask("/").status == 200
    # It was killed: what it left behind is in nobody's way.
    with own_web(daemon, tmp_path) as second:
        assert second.ask("/").status == 200
        second.process.send_signal(signal.SIGINT)
        second.process.wait(PATIENCE_S)


def test_a_job_is_cancelled_with_the_words_of_the_command(daemon: Daemon, own: Own) -> None:
    number = daemon.submit("--mem", "1G", "--name", "net", "sleep", "600")
    daemon.wait_until(number, "active")
    page = own.ask(f"/jobs/{number}").text
    assert f'href="../jobs/{number}/cancel"' in page
    assert "Release" not in page
    reply = own.confirm(f"/jobs/{number}/cancel")
    assert reply.status == 200
    assert f"$ gpulease cancel {number}" in reply.text
    assert f"job {number} is ending" in reply.text
    daemon.wait_until(number, "ended")
    assert "/cancel" not in own.ask(f"/jobs/{number}").text


def test_a_job_gets_more_time_and_a_wrong_span_is_explained(daemon: Daemon, own: Own) -> None:
    number = daemon.submit("--mem", "1G", "--time", "1h", "sleep", "600")
    before = daemon.wait_until(number, "active")["expires_at"]
    wrong = own.confirm(f"/jobs/{number}/extend", span="--all")
    assert wrong.status == 409
    assert "hint:" in wrong.text
    assert daemon.client.job(number).expires_at == before
    assert own.confirm(f"/jobs/{number}/extend", span="2h").status == 200
    after = daemon.client.job(number).expires_at
    assert after is not None
    assert after > before


def test_a_waiting_job_is_held_released_and_an_ended_one_runs_again(
    daemon: Daemon, own: Own
) -> None:
    number = int(daemon.run("run", "-d", "--mem", "1G", "--begin", "+1h", "true").stdout)
    reply = own.confirm(f"/jobs/{number}/hold")
    assert reply.status == 200, reply.text
    found = daemon.client.job(number).queue
    assert found is not None
    assert found.held
    assert own.confirm(f"/jobs/{number}/release").status == 200
    found = daemon.client.job(number).queue
    assert found is not None
    assert not found.held
    done = daemon.submit("--mem", "1G", "true")
    daemon.wait_until(done, "ended")
    reply = own.confirm(f"/jobs/{done}/again")
    assert reply.status == 200, reply.text
    assert len(daemon.jobs()) == 3


def test_output_is_shown_as_a_terminal_would_leave_it(daemon: Daemon, own: Own) -> None:
    text = r"printf '\033[32mgreen\033[0m <b>\n10%%\r99%%\nlast'; sleep 600"
    number = daemon.submit("--mem", "1G", "sh", "-c", text)
    daemon.wait_until(number, "active")
    wait_for("it has written", lambda: "last" in own.ask(f"/jobs/{number}/output").text)
    shown = own.ask(f"/jobs/{number}/output").text
    assert "green <b>\n99%\nlast" in shown
    assert "10%" not in shown


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "localhost"),
        ("null", "localhost"),
        ("http://evil.example", "localhost"),
        ("http://localhost:8080", "localhost"),
        ("http://evil.example", "evil.example"),  # its name points to this machine
    ],
)
def test_forms_of_other_sites_do_nothing(
    daemon: Daemon, own: Own, origin: str | None, host: str
) -> None:
    number = daemon.submit("--mem", "1G", "sleep", "600")
    daemon.wait_until(number, "active")
    path = f"/jobs/{number}/cancel"
    token = own.token(path)
    assert own.ask(path, {"token": token}, origin, host).status in (403, 421)
    assert daemon.client.job(number).state == "active"


def test_a_form_acts_on_its_own_job_alone(daemon: Daemon, own: Own) -> None:
    first, second = (daemon.submit("--mem", "1G", "sleep", "600") for _ in range(2))
    daemon.wait_until(second, "active")
    token = own.token(f"/jobs/{first}/cancel")
    assert own.ask(f"/jobs/{second}/cancel", {"token": token}).status == 403
    token = own.token(f"/jobs/{second}/keep")
    assert own.ask(f"/jobs/{second}/cancel", {"token": token}).status == 403
    assert daemon.client.job(second).state == "active"


def test_a_form_acts_once(daemon: Daemon, own: Own) -> None:
    number = daemon.submit("--mem", "1G", "--time", "1h", "sleep", "600")
    daemon.wait_until(number, "active")
    path = f"/jobs/{number}/extend"
    token = own.token(path)
    assert own.ask(path, {"token": token, "span": "1h"}).status == 200
    after = daemon.client.job(number).expires_at
    assert own.ask(path, {"token": token, "span": "1h"}).status == 403
    assert daemon.client.job(number).expires_at == after


def test_an_array_is_cancelled_as_a_whole_and_says_so(daemon: Daemon, own: Own) -> None:
    number = daemon.submit("--mem", "1G", "--array", "0-3", "--", "sleep", "600")
    assert f'jobs/{number}/cancel"' in own.ask(f"/jobs/{number}").text
    assert "all its elements" in own.ask(f"/jobs/{number}/cancel").text
    assert own.ask(f"/jobs/{number}/output").status == 403
    reply = own.confirm(f"/jobs/{number}/cancel")
    assert reply.status == 200, reply.text
    wait_for("all have ended", lambda: all(job["state"] == "ended" for job in daemon.jobs()))


def test_a_form_without_the_token_does_nothing(daemon: Daemon, own: Own) -> None:
    number = daemon.submit("--mem", "1G", "sleep", "600")
    daemon.wait_until(number, "active")
    path = f"/jobs/{number}/cancel"
    for token in ("", "x" * 43, own.token(path)[:-1]):
        assert own.ask(path, {"token": token}).status == 403
    assert own.ask(path, {"token": own.token(path), "more": "x" * 5000}).status == 400
    assert own.ask("/jobs/nothing/cancel", {"token": own.token(path)}).status == 404
    assert daemon.client.job(number).state == "active"


@needs_root
def test_jobs_of_others_are_shown_and_left_alone(tmp_path: Path) -> None:
    with daemon_for_all() as daemon:
        status, made = call(daemon, OTHER, "POST", "/v1/jobs", job("sleep", "600"))
        assert status == 201, made
        number = made["id"]
        daemon.wait_until(number, "active")
        mine = daemon.submit("--mem", "1G", "--begin", "+1h", "true")
        call(daemon, OTHER, "POST", "/v1/jobs", job("sleep", "600"))
        # The tests are root, who could do it with the command.
        with own_web(daemon, tmp_path) as own:
            assert "/cancel" not in own.ask(f"/jobs/{number}").text
            assert own.ask("/find?q=last").headers["location"] == f"jobs/{mine}"
            for name in ("cancel", "output"):
                assert own.ask(f"/jobs/{number}/{name}").status == 403
            assert daemon.client.job(number).state == "active"


_AS_OTHER = """
import encodings.idna, os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
with socket.create_connection(("127.0.0.1", int(sys.argv[2])), 20) as made:
    made.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    try:
        print(len(made.recv(1)))
    except ConnectionResetError:
        print(0)
"""


@needs_root
def test_on_a_port_the_kernel_says_who_connects(daemon: Daemon, tmp_path: Path) -> None:
    with own_web(daemon, tmp_path, "--open") as own:
        assert own.ask("/", host=f"127.0.0.1:{own.port}").status == 200
        for uid, received in ((OTHER, "0"), (os.geteuid(), "1")):
            done = subprocess.run(
                [sys.executable, "-c", _AS_OTHER, str(uid), str(own.port)],
                capture_output=True, text=True, check=True, timeout=PATIENCE_S, cwd="/",
            )  # fmt: skip
            assert done.stdout.strip() == received


_LISTEN_AS = """
import os, sys
from gpulease.errors import GpuleaseError
from gpulease.web.listening import listen_for_own
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
try:
    print(listen_for_own(on_port=False).getsockname())
except GpuleaseError as error:
    print(error.text())
"""


@needs_root
@pytest.mark.parametrize("open_part", [".", "gpulease"])
def test_a_directory_that_others_may_write_to_is_refused(open_part: str) -> None:
    # Of root, all directories are checked: this is another user.
    with open_folder() as folder:
        (folder / "gpulease").mkdir()
        for part in (folder, folder / "gpulease"):
            os.chown(part, OTHER, OTHER)
            part.chmod(0o700)

        def said() -> str:
            line = [sys.executable, "-c", _LISTEN_AS, str(OTHER)]
            variables = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
            done = subprocess.run(
                line, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=True
            )
            return done.stdout.strip()

        assert said() == str(folder / "gpulease" / "web.sock")
        (folder / open_part).chmod(0o777)
        refused = said()
        assert mentions(refused, "cannot serve your jobs", "may write to", "hint: chmod go-w")
        (folder / open_part).chmod(0o1777)
        assert said() == str(folder / "gpulease" / "web.sock")


def test_a_socket_that_systemd_has_not_opened_is_missed(daemon: Daemon, tmp_path: Path) -> None:
    for program in ("", "exec 3</dev/null; "):
        line = f"{program}LISTEN_PID=$$ exec {sys.executable} -m gpulease.cli web --socket $0"
        done = subprocess.run(
            ["sh", "-c", line, str(daemon.socket)], capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (78, "")
        assert mentions(done.stderr, "cannot serve your jobs: LISTEN_PID", "hint: ")
        assert "Traceback" not in done.stderr


def test_a_socket_that_systemd_opened_for_another_is_none_of_ours(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISTEN_PID", "1")
    with own_web(daemon, tmp_path) as own:
        assert "ssh -L" in own.said
        assert own.ask("/").status == 200


def test_systemd_may_open_the_socket(daemon: Daemon, tmp_path: Path) -> None:
    # As in sd_listen_fds(3): the first descriptor is 3, and the pid is that of the process.
    path = tmp_path / "passed"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        inherited = listening.fileno()
        text = (
            f"import os, sys; os.dup2({inherited}, 3); os.environ['LISTEN_PID'] = str(os.getpid());"
            "os.execv(sys.executable, [sys.executable, '-m', 'gpulease.cli', 'web', '--host',"
            f"'gpus.example', '--socket', '{daemon.socket}'])"
        )
        process = subprocess.Popen([sys.executable, "-c", text], pass_fds=[inherited])
    try:
        own = Own.__new__(Own)
        own.path, own.port = str(path), 0
        # A proxy that has asked for a password passes on its own name.
        assert own.ask("/", host="gpus.example").status == 200
        assert own.ask("/", host="evil.example").status == 421
    finally:
        process.kill()
        process.wait()
