"""A daemon of one's own: one, however many ask, and its own words when it cannot be."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from daemon_rig import PATIENCE_S, alive, wait_for
from gpulease import config, user_daemon
from gpulease.client import answers, has_daemon
from gpulease.client.errors import lost, no_daemon
from gpulease.errors import NoDaemon
from gpulease.user_daemon import ensure, serving


def test_what_a_daemon_says_as_it_leaves_is_the_error(tmp_path: Path) -> None:
    said = "cannot read the GPUs: there is no driver\n\nhint: install it"
    (tmp_path / config.PERSONAL_LOG).write_text("cannot start: an older reason\n\nhint: none\n")
    command = [sys.executable, "-c", f"import sys; print('INFO x'); sys.exit({said!r})"]
    with pytest.raises(NoDaemon) as raised:
        ensure(tmp_path / "run" / "s", tmp_path, answers, command, 30.0)
    assert raised.value.message.endswith("cannot read the GPUs: there is no driver")
    assert raised.value.hint == "install it"


def test_one_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(NoDaemon) as raised:
        ensure(tmp_path / "s", tmp_path, answers, command, 1.0)
    assert str(tmp_path / config.PERSONAL_LOG) in (raised.value.hint or "")


class Home:
    """A user's account on a machine without a system daemon, in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.runtime, self.states = folder / "run", folder / "states"
        self.runtime.mkdir(mode=0o700)
        self._daemons: list[subprocess.Popen[bytes]] = []
        kept = {key: value for key, value in os.environ.items() if "GPULEASE" not in key}
        self.environment = {
            **kept,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_STATE_HOME": str(self.states),
            "GPULEASE_SIMULATE": "4x24G",
        }

    @property
    def socket(self) -> Path:
        return self.runtime / "gpulease" / "gpuleased.sock"

    @property
    def state(self) -> Path:
        return config.personal_state(self.environment)

    @property
    def pid(self) -> int:
        told = serving(self.state)
        assert told is not None
        return told.pid

    def open(self, *line: str, **changed: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "gpulease.cli", *line],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**self.environment, **changed},
        )  # fmt: skip

    def run(self, *line: str, **changed: str) -> tuple[int, str, str]:
        process = self.open(*line, **changed)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def daemon(self, *options: str) -> subprocess.Popen[bytes]:
        """Start one by hand, which tests wait for; `ensure` would leave a short-lived one alone."""
        self.states.mkdir(exist_ok=True)
        with (self.states / "by-hand.log").open("ab") as log:
            process = subprocess.Popen(
                [*user_daemon.daemon_command(), *options], env=self.environment, cwd="/",
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_for("it answers", lambda: answers(self.socket) or process.poll() is not None)
        assert process.poll() is None, (self.states / "by-hand.log").read_text()
        self._daemons.append(process)
        return process

    def end(self) -> None:
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait(PATIENCE_S)
        told = serving(self.state)
        if told is not None and alive([told.pid]):
            os.kill(told.pid, signal.SIGTERM)
            wait_for("the daemon leaves", lambda: not alive([told.pid]))


@pytest.fixture
def home(no_daemon_of_the_machine: None, tmp_path: Path) -> Iterator[Home]:
    if has_daemon():
        pytest.skip("this machine has a daemon")
    at = Home(tmp_path)
    yield at
    at.end()


def test_twenty_runs_at_once_have_one_daemon_and_all_succeed(home: Home) -> None:
    runs = [home.open("run", "--mem", "1G", "--", "true") for _ in range(20)]
    ended = [(run.communicate(timeout=PATIENCE_S)[1], run.returncode) for run in runs]
    assert [code for _, code in ended] == [0] * 20, ended
    assert sum(str(home.socket) in said for said, _ in ended) == 1, "one has started it"
    log = (home.state / config.PERSONAL_LOG).read_text()
    assert log.count(str(home.socket)) == 1
    assert user_daemon.IN_USE not in log


def test_it_has_nothing_of_the_terminal_that_started_it(home: Home) -> None:
    extra = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(extra, True)
    try:
        assert home.run("run", "--mem", "1G", "--", "true")[0] == 0
    finally:
        os.close(extra)
    fields = Path(f"/proc/{home.pid}/stat").read_text().rpartition(")")[2].split()
    parent, session, terminal = fields[1], fields[3], fields[4]
    assert parent != str(os.getpid())
    assert session == str(home.pid)
    assert terminal == "0"
    links = {}
    for each in Path(f"/proc/{home.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            links[each.name] = each.readlink()
    log = home.state / config.PERSONAL_LOG
    assert [links[each] for each in "012"] == [Path(os.devnull), log, log]
    assert list(links.values()).count(Path(os.devnull)) == 1


def test_it_leaves_when_it_has_been_idle_and_comes_back_for_who_asks(
    home: Home, tmp_path: Path
) -> None:
    short, gate = tmp_path / "short.toml", tmp_path / "gate"
    short.write_text('leave_when_idle = "1s"\n')
    # It finds the job at its start: a command would have to come within a second.
    first = home.daemon()
    script = f"echo kept; until test -e {gate}; do sleep 0.05; done"
    code, number, _ = home.run("run", "-d", "--mem", "1G", "--", "sh", "-c", script)
    assert code == 0
    first.kill()
    first.wait()
    daemon = home.daemon("--config", str(short))
    # As long as a job lives, so does the daemon, however short its patience.
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.wait(1.5)
    gate.touch()
    assert daemon.wait(PATIENCE_S) == 0
    assert not home.socket.exists()
    code, out, said = home.run("logs", number.strip())
    assert (code, out) == (0, "kept\n"), said


def test_a_socket_that_logout_took_away_is_laid_anew(home: Home) -> None:
    daemon = home.daemon()
    home.socket.unlink()
    home.socket.parent.rmdir()
    wait_for("it listens anew", lambda: answers(home.socket))
    assert home.run("run", "--mem", "1G", "--", "echo", "found")[:2] == (0, "found\n")
    assert home.pid == daemon.pid


def test_a_run_that_comes_while_the_socket_is_gone_waits_for_it(home: Home) -> None:
    daemon = home.daemon()
    kept = home.runtime.with_name("gone")
    home.runtime.rename(kept)
    home.runtime.write_text("no folder can be made here\n")
    run = home.open("run", "--mem", "1G", "--", "echo", "found", XDG_RUNTIME_DIR=str(home.states))
    log = home.state / config.PERSONAL_LOG
    wait_for(
        "it finds the state locked", lambda: log.exists() and user_daemon.IN_USE in log.read_text()
    )
    told = home.states / "by-hand.log"
    wait_for("the daemon has seen that, too", lambda: "WARNING" in told.read_text())
    assert run.poll() is None
    home.runtime.unlink()
    home.runtime.mkdir(mode=0o700)
    out, said = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, out) == (0, "found\n"), said
    assert said == ""
    assert home.pid == daemon.pid


def test_a_socket_of_someone_else_is_left_alone(home: Home) -> None:
    daemon = home.daemon()
    home.socket.unlink()
    home.socket.write_text("a file of the user\n")
    log = home.states / "by-hand.log"
    wait_for("it has seen that", lambda: "WARNING" in log.read_text())
    daemon.terminate()
    assert daemon.wait(PATIENCE_S) == 0
    assert home.socket.read_text() == "a file of the user\n"


def test_a_session_without_a_runtime_directory_finds_the_same_daemon(home: Home) -> None:
    daemon = home.daemon()
    code, out, said = home.run("run", "--mem", "1G", "--", "echo", "x", XDG_RUNTIME_DIR="")
    assert (code, out, said) == (0, "x\n", "")
    assert home.pid == daemon.pid


def test_a_wish_for_other_simulated_gpus_is_answered(home: Home) -> None:
    home.daemon()
    code, _, said = home.run("run", "--mem", "1G", "--", "true", GPULEASE_SIMULATE="1x2G")
    assert code == 0
    assert said.count("\n") == 1
    assert "4x24G" in said and f"kill {home.pid}" in said


def test_the_record_is_the_hosts_own_but_an_old_one_stays(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    assert config.personal_state(environment, "node1") == tmp_path / "gpulease" / "node1"
    (tmp_path / "gpulease").mkdir()
    (tmp_path / "gpulease" / "gpulease.db").touch()
    assert config.personal_state(environment, "node1") == tmp_path / "gpulease"


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(), ConnectionResetError(), TimeoutError(), FileNotFoundError()]
)
def test_a_lost_daemon_of_ones_own_is_named_with_its_log(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = str(config.personal_state() / config.PERSONAL_LOG)
    mine, another = config.personal_socket(), tmp_path / "another.sock"
    assert log in (no_daemon(mine, error).hint or "")
    assert log in (lost(mine).hint or "")
    assert log not in (no_daemon(another, error).hint or "")
