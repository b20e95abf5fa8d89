"""Sockets on which another user listens: none is sent an environment, and no hint leads there."""

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from goldens import mentions
from gpulease import config, locations
from gpulease.cli.app import call
from gpulease.errors import BadConfiguration, NoDaemon
from gpulease.lease_api.acquire import connect
from gpulease.server.listener import listen
from process_rig import PYTHON, ephemeral_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

_LISTEN = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
os.setgid(uid); os.setuid(uid)
fake = socket.socket(socket.AF_UNIX); fake.bind(path); fake.listen()
os.chmod(path, int(sys.argv[3], 8))
print("up", flush=True)
while True:
    heard = fake.accept()[0].recv(1 << 16)
    if heard: print("heard", heard.split()[:2], flush=True)
"""


class Foreign:
    """A process of another user that listens, and says what it heard."""

    def __init__(self, user: pwd.struct_passwd, mode: int = 0o666) -> None:
        self.user = user
        self._folder = tempfile.TemporaryDirectory(prefix="gpulease-foreign-", dir="/tmp")
        os.chown(self._folder.name, user.pw_uid, user.pw_gid)
        Path(self._folder.name).chmod(0o755)
        self.path = Path(self._folder.name, "gpuleased.sock")
        self._process = subprocess.Popen(
            [PYTHON, "-c", _LISTEN, str(self.path), str(user.pw_uid), f"{mode:o}"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"

    def heard(self) -> str:
        """Return what it heard so far, and end it."""
        assert self._process.stdout is not None
        self._process.terminate()
        return self._process.stdout.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()
        self._folder.cleanup()


@pytest.fixture
def foreign(user: pwd.struct_passwd) -> Iterator[Foreign]:
    with Foreign(user) as made:
        yield made


@pytest.fixture
def squatted(foreign: Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Foreign:
    """Have another user listen where the caller's own daemon would; the machine has none."""
    for variable in ("GPULEASE_SOCKET", "GPULEASE_JOB"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(config, "SYSTEM_SOCKET", tmp_path / "machine" / "gpuleased.sock")
    monkeypatch.setattr(locations, "SYSTEM_SOCKET", str(config.SYSTEM_SOCKET))
    monkeypatch.setattr(config, "runtime_directory", lambda *_: foreign.path.parent)
    monkeypatch.setattr(locations, "runtime_directory", lambda *_: str(foreign.path.parent))
    return foreign


@pytest.mark.parametrize("line", ["status", "list", "doctor"])
def test_who_listens_in_place_of_ones_own_daemon_is_named_with_a_safe_hint(
    squatted: Foreign, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([line]) in (1, NoDaemon.exit_code)
    said = " ".join("".join(capsys.readouterr()).split())
    user = squatted.user
    assert mentions(said, user.pw_name, str(user.pw_uid))
    assert str(squatted.path.parent) in said
    assert "XDG_RUNTIME_DIR" in said
    assert "--socket" not in said
    assert "FAILURE" in said or line != "doctor"
    assert squatted.heard() == ""


@pytest.mark.parametrize("folder", ["", "/tmp"])
def test_a_folder_in_place_of_a_socket_is_named_as_one(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["--socket", folder, "status"]) == NoDaemon.exit_code
    assert mentions(capsys.readouterr().err, f"{folder or '.'} is a directory", "gpuleased.sock")


@pytest.mark.parametrize("line", ["run --mem 1G true", "hold --mem 1G"])
def test_no_daemon_is_started_where_another_user_could_take_its_place(
    squatted: Foreign, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(line.split()) == NoDaemon.exit_code
    said = capsys.readouterr().err
    assert mentions(said, str(squatted.path.parent), str(squatted.user.pw_uid))
    assert "--socket" not in said
    with pytest.raises(NoDaemon, match=str(squatted.user.pw_uid)):
        connect()
    assert squatted.heard() == ""


def test_a_socket_named_on_purpose_is_asked_and_is_sent_no_environment(
    foreign: Foreign, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GPULEASE_JOB", raising=False)
    for line in ("run true", "run -d true", "hold --mem 1G"):
        assert call(["--socket", str(foreign.path), *line.split()]) == NoDaemon.exit_code
        assert str(foreign.path) in capsys.readouterr().err
    assert "/v1/jobs" not in foreign.heard()


@pytest.mark.parametrize("mode", [0o666, 0o600])
def test_a_user_does_not_believe_the_environment_either(user: pwd.struct_passwd, mode: int) -> None:
    with ephemeral_user() as other, Foreign(other, mode) as foreign:
        code = (
            "import os, gpulease.client.client\n"
            f"os.setgid({user.pw_gid}); os.setuid({user.pw_uid})\n"
            "gpulease.client.Client().status()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
            check=False, cwd="/",
            env={**os.environ, "GPULEASE_SOCKET": str(foreign.path), "HOME": "/nonexistent"},
        )  # fmt: skip
        assert other.pw_name in done.stderr
        assert foreign.heard() == ""


def test_a_daemon_does_not_listen_in_the_directory_of_another_user(
    foreign: Foreign, user: pwd.struct_passwd
) -> None:
    with pytest.raises(BadConfiguration, match=str(user.pw_uid)):
        listen(foreign.path.parent / "mine", to_all=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        Path(shared).chmod(0o1777)
        listen(Path(shared, "mine"), to_all=False).close()
