"""A daemon that lies, and the command of whoever was led to it: no terminal obeys it."""

import json
import os
import subprocess
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.terminal import REPOSITORY, Terminal, gpulease, ran
from goldens import mentions
from gpulease import errors
from gpulease.errors import BadValue
from gpulease.light_json import indent
from gpulease.wire.jobs import EventView
from gpulease.wire.machine import CheckView, DoctorView
from process_rig import PYTHON, ephemeral_user

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\r\n\x7f\u2028"
_READ_AS_VALUES = {"at", "state", "outcome", "kind", "gpu", "uuid", "enforced_by", "directory"}


def poison(view: Any) -> None:
    """Put into every text of a view what a terminal would obey."""
    for field in fields(view):
        value = getattr(view, field.name)
        for each in value if isinstance(value, list) else [value]:
            if is_dataclass(each):
                poison(each)
        is_text = isinstance(value, str) or (value is None and "str" in str(field.type))
        if is_text and field.name not in _READ_AS_VALUES and not field.name.endswith("_at"):
            setattr(view, field.name, f"{value or ''}{EVIL}")


@pytest.fixture
def daemon(daemon: StandIn) -> StandIn:
    daemon.status = views.busy_status()
    for job in (views.over(9, 1), views.running(12), views.waiting()):
        job.events = [EventView("2026-03-02T14:00:00Z", "submitted", "by alice")]
        poison(job)
        daemon.jobs[job.id] = job
    poison(daemon.status)
    daemon.doctor = DoctorView([CheckView("driver", "failure", "it is gone", "load it")])
    poison(daemon.doctor)
    return daemon


def harmless(shown: str) -> bool:
    return not [char for char in shown if not char.isprintable() and char != "\n"]


LOOKS = (
    ("status",), ("status", "--json"), ("list", "--all"), ("list", "--all", "--json"),
    ("show", "9"), ("show", "12"), ("show", "12", "--json"), ("show", "17"), ("doctor",),
    ("doctor", "--json"), ("cancel", "17"), ("extend", "12", "+1h"), ("attach", "9"),
    ("logs", "12"), ("run", "-d", "--mem", "1G", "true"),
)  # fmt: skip


@pytest.mark.parametrize("line", LOOKS, ids=" ".join)
def test_nothing_that_a_daemon_tells_steers_a_terminal(
    daemon: StandIn, line: tuple[str, ...]
) -> None:
    done = ran(daemon.path, *line)
    shown = done.stdout + done.stderr
    assert "Traceback" not in shown
    assert harmless(shown), shown


@pytest.mark.parametrize("line", [("status",), ("list", "--all"), ("show", "12")], ids=" ".join)
def test_on_a_terminal_only_our_own_colours_are_obeyed(
    daemon: StandIn, line: tuple[str, ...]
) -> None:
    terminal = Terminal(gpulease(daemon.path, *line), size=(50, 100))
    terminal.finish()
    for evil in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x7f", "\u2028", "\x07"):
        assert evil not in terminal.shown


@pytest.mark.parametrize("line", [("status",), ("show", "12", "--json"), LOOKS[-1]], ids=" ".join)
def test_no_refusal_of_a_daemon_steers_a_terminal(daemon: StandIn, line: tuple[str, ...]) -> None:
    daemon.refusal = BadValue(f"cannot do this: {EVIL}", f"try {EVIL}")
    done = ran(daemon.path, *line)
    assert done.returncode != 0
    assert harmless(done.stdout + done.stderr)


def test_what_json_says_is_the_same_with_its_characters_escaped() -> None:
    written = json.dumps({"name": f"{EVIL}\U000e0001 caf\u00e9"}, ensure_ascii=False)
    text = indent(written.encode())
    assert harmless(text)
    assert "caf\u00e9" in text
    assert json.loads(text) == json.loads(written)


_FAKE = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
os.setgid(uid); os.setuid(uid)
fake = socket.socket(socket.AF_UNIX); fake.bind(path); fake.listen()
print("up", flush=True)
while True:
    heard = fake.accept()[0].recv(1 << 16)
    print("heard", len(heard), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(
    "line", [("status",), ("run", "true"), ("hold", "--mem", "1G")], ids=" ".join
)
def test_root_tells_nothing_to_a_users_daemon_that_the_environment_names(
    line: tuple[str, ...],
) -> None:
    with (
        ephemeral_user() as user,
        tempfile.TemporaryDirectory(prefix="gpulease-hostile-", dir="/tmp") as folder,
    ):
        os.chown(folder, user.pw_uid, user.pw_gid)
        path = Path(folder, "s")
        with subprocess.Popen(
            [PYTHON, "-c", _FAKE, str(path), str(user.pw_uid)], stdout=subprocess.PIPE, text=True
        ) as fake:
            assert fake.stdout is not None
            assert fake.stdout.readline() == "up\n"
            command = [
                part for part in gpulease(path, *line) if part not in ("--socket", str(path))
            ]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "GPULEASE_SOCKET": str(path)},
            )  # fmt: skip
            assert fake.stdout.readline() == "heard 0\n"
            fake.kill()
    assert done.returncode == errors.EXIT_OWN_FAILURE
    assert mentions(done.stderr, str(path), user.pw_name)
    assert "GPULEASE_SOCKET" in done.stderr
