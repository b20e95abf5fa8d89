"""A real gpulease-web beside a real daemon, run without rights where tests run as root."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import NamedTuple

from daemon_rig import PATIENCE_S, wait_for

NOBODY = 65_534

# Everything is imported before it becomes the user, since the Python of a test run may stand where
# only root can read.
_START = """
import contextlib, encodings.idna, importlib, os, pkgutil, sys
import anyio, gpulease.client, gpulease.web, starlette, uvicorn
for package in (anyio, gpulease.client, gpulease.web, starlette, uvicorn):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError, RuntimeError):
                importlib.import_module(module.name)
uid = int(sys.argv.pop(1))
if uid != os.geteuid():
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
from gpulease.web.main import main
main()
"""


class Reply(NamedTuple):
    """An answer of the web server."""

    status: int
    headers: dict[str, str]
    text: str


class Web(NamedTuple):
    """A gpulease-web that runs."""

    process: subprocess.Popen[str]
    host: str
    """Or the path of its Unix socket."""
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @contextmanager
    def open(self, path: str, method: str = "GET", **headers: str) -> Iterator[HTTPResponse]:
        made = HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        if not self.port:
            made.sock = socket.socket(socket.AF_UNIX)
            made.sock.connect(self.host)
        made.request(method, path, headers=headers)
        with closing(made), made.getresponse() as reply:
            yield reply

    def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        with self.open(path, method, **headers) as reply:
            text = reply.read().decode()
            names = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, names, text)


@contextmanager
def web(daemon: Path, *arguments: str, uid: int | None = None) -> Iterator[Web]:
    """Run gpulease-web for the daemon on the socket `daemon`, on a free port of loopback."""
    uid = (NOBODY if os.geteuid() == 0 else os.geteuid()) if uid is None else uid
    line = [sys.executable, "-W", "ignore", "-c", _START, str(uid), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*line, "--socket", str(daemon), *arguments],
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd="/",
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"serving (?:http://([\d.]+):(\d+)/|unix:(\S+)) for", said)
        assert found, said + process.stderr.read()
        started = Web(process, found[1] or found[3], int(found[2] or 0))
        wait_for("the page is served", lambda: started.get("/static/style.css").status == 200)
        yield started
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
