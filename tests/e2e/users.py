"""A second user of this machine, for tests that take root: what the kernel says of who calls."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon, open_folder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users takes root")

STRANGER, OTHER = 47_110, 47_111
"""Users whom no database knows: a uid is all that the kernel goes by."""

# The calls of a user, from a process that has become them: one line of JSON for each.
_CALLS = """
import concurrent.futures.thread, encodings.idna, http.client
import json, os, resource, select, socket, sys
uid, path = int(sys.argv[1]), sys.argv[2]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(path)
def call(method, target, body=None):
    made = Unix("localhost", timeout=120)
    made.request(method, target, None if body is None else json.dumps(body),
                 {"content-type": "application/json"})
    reply = made.getresponse()
    content = reply.read()
    made.close()
    return [reply.status, json.loads(content)]
def raw():
    made = socket.socket(socket.AF_UNIX); made.settimeout(60); made.connect(path)
    return made
def tell(what):
    print(json.dumps(what), flush=True)
"""


@contextmanager
def daemon_for_all(state: Path | None = None, **settings: str) -> Iterator[Daemon]:
    """Yield a running daemon whose socket every user can reach; `state` may be on another disk."""
    with open_folder() as folder:
        made = Daemon(folder, settings={"grace": "2s", **settings})
        if state is not None:
            made.state.symlink_to(state)
        try:
            yield made.start()
        finally:
            made.end_all()


@contextmanager
def as_user(daemon: Daemon, uid: int, program: str) -> Iterator[subprocess.Popen[str]]:
    """Run `program` as a user: it may `call`, open a `raw` connection, and `tell`."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CALLS + program, str(uid), str(daemon.socket)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> Any:
    """Return what the program told next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended without a word"
    return json.loads(line)


def call(daemon: Daemon, uid: int, method: str, target: str, body: object = None) -> Any:
    """Return status and content of one call of a user."""
    program = f"tell(call({method!r}, {target!r}, json.loads(sys.stdin.readline())))"
    with as_user(daemon, uid, program) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(body) + "\n")
        process.stdin.flush()
        return told(process)


def job(*argv: str, memory: int = 8 << 30, **fields: object) -> dict[str, object]:
    """Return a submission."""
    environment = fields.pop("environment", {"PATH": "/usr/bin:/bin"})
    return {
        "argv": list(argv or ("true",)), "cwd": "/", "environment": environment,
        "claim": {"memory": memory}, **fields,
    }  # fmt: skip
