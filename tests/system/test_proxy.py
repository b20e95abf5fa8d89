"""The recipe of docs/admin/web.md for many users behind one proxy, as it stands there, in nginx."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from daemon_rig import wait_for

from . import root
from .conftest import CONFIG, SERVICE, SETUP, Gpulease
from .machine import Machine

RECIPE = root.REPOSITORY / "docs/admin/web.md"
SITE = "gpu01.example.org"
PASSWORDS = {"alice": "open sesame", "bob": "swordfish"}
_ASK = """
import http.client, json, sys
asked = json.loads(sys.argv[1])
made = http.client.HTTPConnection("127.0.0.1", timeout=60)
made.request(asked["method"], asked["path"], asked["body"], asked["headers"])
reply = made.getresponse()
text = b""
while asked["until"] not in text.decode(errors="replace") and (piece := reply.read1()):
    text += piece
print(json.dumps([reply.status, text.decode()]))
"""
_CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


class Reply(NamedTuple):
    status: int
    text: str


def blocks() -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each file in the recipe."""
    (part,) = re.findall(
        r"^## An instance for each user\n(.*?)^## ", RECIPE.read_text(), re.M | re.S
    )
    yield from re.findall(r"^```(\w+)\n(.*?)^```", part, re.M | re.S)


@pytest.fixture(scope="module")
def nginx(debian: Path) -> Path:
    """Return what nginx adds to the Debian, which is fetched once."""

    def build(folder: Path) -> None:
        machine = Machine(folder, [debian])
        try:
            machine.mount()
            shutil.copy("/etc/resolv.conf", machine.root / "etc/resolv.conf")
            for line in (("update", "-qq"), ("install", "-qq", "-y", "nginx")):
                words = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *line)
                root.inside(machine.root, *words)
            shutil.rmtree(machine.root / "var/cache/apt")
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            raise root.NoDebian(error) from error
        finally:
            machine.remove()

    try:
        made = root.cached(f"nginx-{root.RELEASE}", f"nginx {debian}".encode(), build)
    except root.NoDebian as error:
        pytest.skip(f"nginx cannot be fetched: {error}")
    return made / "upper"


@pytest.fixture(scope="module")
def proxied(
    disk: list[Path], nginx: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gpulease]:
    """Yield a machine on which an admin has done what the recipe says."""
    machine = Machine(tmp_path_factory.mktemp("proxied"), [nginx, *disk])
    gpulease = Gpulease(machine)
    try:
        machine.boot()
        gpulease.configure(CONFIG)
        machine.run(SETUP, "install", "--now")
        for language, text in blocks():
            if found := re.match(r"# (/etc/systemd/\S+)\n", text):
                machine.write(found[1].lstrip("/"), text)
            elif language == "nginx":
                server = f"server {{\nlisten 80;\nserver_name {SITE};\n{text}}}\n"
                machine.write("etc/nginx/sites-available/default", server)
        lines = "".join(f"{user}:{{PLAIN}}{word}\n" for user, word in PASSWORDS.items())
        machine.write("etc/nginx/gpulease.htpasswd", lines)
        machine.run("systemctl", "daemon-reload")
        for user in PASSWORDS:
            machine.run("systemctl", "enable", "--now", f"gpulease-web@{user}.socket")
        machine.run("systemctl", "restart", "nginx")
        yield gpulease
    finally:
        machine.remove()


def ask(
    machine: Machine,
    path: str,
    user: str | None = "alice",
    form: str | None = None,
    *,
    host: str = SITE,
    origin: str = f"http://{SITE}",
    until: str = "</html>",
) -> Reply:
    """Ask the proxy as the browser of a user who has logged in; as nobody without a user."""
    headers = {"host": host}
    if user is not None:
        login = f"{user}:{PASSWORDS.get(user, '')}".encode()
        headers["authorization"] = f"Basic {base64.b64encode(login).decode()}"
    if form is not None:
        headers |= {"origin": origin, "content-type": "application/x-www-form-urlencoded"}
    method = "GET" if form is None else "POST"
    asked = {"method": method, "path": path, "body": form, "headers": headers, "until": until}
    said = machine.run("/usr/bin/python3", "-c", _ASK, json.dumps(asked), user="bob").stdout
    return Reply(*json.loads(said))


def token(machine: Machine, path: str, user: str) -> str:
    found = re.search(r'name="token" value="([^"]+)"', ask(machine, path, user).text)
    assert found, path
    return f"token={found[1]}"


def test_each_login_acts_as_its_user_and_on_own_jobs_alone(proxied: Gpulease) -> None:
    machine = proxied.machine
    jobs = {
        user: proxied.submit("--mem", "1G", "--", "sleep", "600", user=user) for user in PASSWORDS
    }
    for user, job in jobs.items():
        proxied.wait_until(job, "active")
        assert ask(machine, f"/jobs/{job}", user).status == 200
        pid = machine.unit(f"gpulease-web@{user}.service", "MainPID")["MainPID"]
        owner = machine.run("stat", "--format=%U", f"/proc/{pid}").stdout
        assert owner == f"{user}\n"
    of_alice = f"/jobs/{jobs['alice']}/cancel"
    assert ask(machine, of_alice, "bob").status == 403
    refused = ask(machine, of_alice, "bob", token(machine, f"/jobs/{jobs['bob']}/cancel", "bob"))
    assert refused.status == 403
    done = ask(machine, of_alice, "alice", token(machine, of_alice, "alice"))
    assert (done.status, "is ending" in done.text) == (200, True), done
    proxied.wait_until(jobs["alice"], "ended")
    assert proxied.job(jobs["bob"])["state"] == "active"


def test_nobody_gets_past_the_proxy(proxied: Gpulease) -> None:
    machine = proxied.machine
    for user in (None, "root", "carol"):
        assert ask(machine, "/", user).status == 401
    for user in PASSWORDS:
        for path in (f"/run/gpulease-web-users/{each}" for each in PASSWORDS):
            done = machine.run("/usr/bin/python3", "-c", _CONNECT, path, user=user, check=False)
            assert "PermissionError" in done.stderr, (user, path)


def test_other_names_and_other_sites_are_refused_behind_the_proxy(proxied: Gpulease) -> None:
    machine = proxied.machine
    job = proxied.submit("--mem", "1G", "--", "sleep", "600")
    proxied.wait_until(job, "active")
    path = f"/jobs/{job}/cancel"
    form = token(machine, path, "alice")
    assert ask(machine, path, "alice", form, origin="https://evil.example").status == 403
    assert ask(machine, path, "alice", form, host="evil.example").status == 421
    assert ask(machine, path, "alice", form, origin=f"https://{SITE}").status == 200


def test_events_pass_through_as_they_come(proxied: Gpulease) -> None:
    machine = proxied.machine
    job = proxied.submit("--mem", "1G", "--name", "seen-by-alice", "--", "sleep", "600")
    proxied.wait_until(job, "active")
    wait_for(
        "the job is in the events",
        lambda: "seen-by-alice" in ask(machine, "/events", until="event: queue").text,
    )


def test_an_instance_that_was_killed_is_back_at_the_next_request(proxied: Gpulease) -> None:
    machine = proxied.machine
    unit = "gpulease-web@alice.service"
    assert ask(machine, "/").status == 200
    machine.run("systemctl", "kill", "--signal=KILL", unit)
    wait_for("it is back", lambda: ask(machine, "/").status == 200)
    machine.run("systemctl", "restart", SERVICE)
    wait_for("the page is back", lambda: ask(machine, "/").status == 200)
