"""Notifications on real daemons: each reaches its receiver once, also if the daemon is killed."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from receiver import Receiver, receiving

from daemon_rig import Daemon, open_folder, wait_for
from e2e.test_failing_passes import FailingDaemon
from e2e.test_out_of_memory import SAYS_SO
from e2e.test_overuse import HUNGRY, WATCHED, Appetite
from e2e.users import call, job, needs_root

ROOT = Path(__file__).parents[2]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def configure(home: Path, *lines: str) -> Path:
    """Write [notify] into the file of the user with this home."""
    folder = home / ".config" / "gpulease"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text("[notify]\n" + "\n".join(lines) + "\n")
    return home


def with_receivers(
    make_daemon: Callable[..., Daemon], home: Path, *lines: str, **fields: Any
) -> Daemon:
    """Return a daemon of which the own user has these receivers."""
    configure(home, *lines)
    environment = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
    return make_daemon(environment=environment, **fields).start()


def kinds(daemon: Daemon, number: int) -> list[str]:
    return [each["kind"] for each in daemon.job(number)["events"]]


def attempts(daemon: Daemon) -> list[str]:
    folder = daemon.state / "notifications"
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


def pids_of_senders() -> list[int]:
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                command = (each / "cmdline").read_bytes()
            except OSError:
                continue
            if b"gpulease.notifications\0" in command:
                found.append(int(each.name))
    return found


def test_failed_over_its_lease_and_out_of_memory_are_each_one_message_whatever_is_killed(
    make_daemon: Callable[..., Daemon], tmp_path: Path, receiver: Receiver
) -> None:
    settings = WATCHED | {"overuse_grace": "600s"}
    daemon = with_receivers(
        make_daemon, tmp_path, f'urls = ["{receiver.url}"]', simulate="1x8G", settings=settings
    )
    gate = tmp_path / "gate"
    wait = f"until test -e {gate}; do sleep 0.05; done"
    fails = daemon.submit(
        "--mem", "1G", "--notify", "end,fail,oom", "--", "sh", "-c", f"{wait}; exit 3"
    )
    short = daemon.submit(
        "--mem", "1G", "--notify", "all", "--", "sh", "-c", f"{wait}; echo '{SAYS_SO}'; exit 1"
    )
    appetite = Appetite(tmp_path)
    over = daemon.submit("--mem", "300M", "--notify", "over-lease,fail", *appetite.command())
    for number in (fails, short, over):
        daemon.wait_until(number, "active")
    begins = f"job {short} (sh) has started"
    wait_for("the start of one is received", lambda: begins in receiver.titles)

    # Killed before the ends: they are stored by the next daemon.
    daemon.kill()
    gate.touch()
    records = [daemon.state / "jobs" / str(each) / "record" for each in (fails, short)]
    wait_for("they end", lambda: all(b'"exited"' in each.read_bytes() for each in records))
    # The next one is killed while the message is on its way, and the one after it, too.
    receiver.open.clear()
    daemon.start()
    wait_for("a message is on its way", lambda: len(receiver.got) == 2)
    daemon.kill()
    # Before the next start: the sender waits 22.5 s for an answer, and a daemon under load may take
    # longer to start. The message would rightly be sent again.
    receiver.open.set()
    daemon.start()
    wait_for("both arrive", lambda: len(receiver.got) == 3)
    daemon.kill()

    appetite.set(800)
    receiver.open.clear()
    daemon.start()
    wait_for("the warning is on its way", lambda: len(receiver.got) == 4)
    daemon.kill()
    receiver.open.set()
    wait_for("its sender ends", lambda: not pids_of_senders())
    daemon.start()
    wait_for("it is settled", lambda: not attempts(daemon))
    daemon.kill()
    daemon.start()
    daemon.end_jobs()
    wait_for("it is warned again", lambda: kinds(daemon, over).count("notice") >= 1)
    last = daemon.submit("--mem", "1G", "--notify", "end", "--", "true")
    after = f"job {last} (true) succeeded"
    wait_for("a later message arrives", lambda: after in receiver.titles)
    wait_for("all are settled", lambda: not attempts(daemon))

    assert sorted(receiver.titles) == sorted([
        begins, after,
        f"job {fails} (sh) failed: exit status 3",
        f"job {short} (sh) ran out of GPU memory",
        f"job {over} ({Path(HUNGRY).name}) has to free memory",
    ])  # fmt: skip
    bodies = {title.partition(": ")[2]: body for title, body in receiver.got}
    assert "hint: use --mem 1.5G" in bodies[f"job {short} (sh) ran out of GPU memory"]


def test_a_command_gets_the_message_with_a_small_environment(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    command = f'command = ["sh", "-c", "cat > {tmp_path}/said; env > {tmp_path}/env"]'
    daemon = with_receivers(make_daemon, tmp_path, command)
    number = daemon.submit("--mem", "1G", "--notify", "end", "--", "true")

    wait_for("it is sent", lambda: (tmp_path / "env").exists() and not attempts(daemon))
    assert f"job {number} (true) succeeded\n\nIt ran for" in (tmp_path / "said").read_text()
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert variables["GPULEASE_EVENT"] == "end" and variables["GPULEASE_JOB"] == str(number)
    assert variables["HOME"] == str(tmp_path)
    assert not variables.keys() & {"GPULEASE_NOTIFICATION", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV"}
    assert not [name for name in variables if name.startswith("PYTHON")]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('comand = "x"', "unknown key"),
        ('urls = ["nosuch://secret"]', "Apprise cannot use the URL"),
    ],
)
def test_why_nothing_was_sent_is_in_the_history_of_the_job(
    make_daemon: Callable[..., Daemon], tmp_path: Path, line: str, why: str
) -> None:
    daemon = with_receivers(make_daemon, tmp_path, line)
    number = daemon.submit("--mem", "1G", "--notify", "end", "--", "true")
    wait_for("it is given up", lambda: "notify_failed" in kinds(daemon, number))
    (failed,) = [each for each in daemon.job(number)["events"] if each["kind"] == "notify_failed"]
    assert why in failed["detail"] and "secret" not in failed["detail"]
    assert why in daemon.log and "secret" not in daemon.log
    wait_for("nothing is left of it", lambda: not attempts(daemon))


def test_the_first_failure_of_an_array_is_the_only_message_and_says_all_that_helps(
    make_daemon: Callable[..., Daemon], tmp_path: Path, receiver: Receiver
) -> None:
    daemon = with_receivers(make_daemon, tmp_path, f'urls = ["{receiver.url}"]')
    said = "echo $GPULEASE_ARRAY_INDEX begins; echo no such file >&2; exit 3"
    daemon.submit("--mem", "1G", "--array", "0-29", "--notify", "fail", "--", "sh", "-c", said)
    wait_for("all have ended", lambda: not daemon.status()["jobs"])
    last = daemon.submit("--mem", "1G", "--notify", "end", "--", "echo", "done")
    wait_for("a later message arrives", lambda: f"job {last} (echo) succeeded" in receiver.titles)
    (title, body), (_, of_last) = receiver.got
    label = title.partition(": job ")[2].partition(" ")[0]
    assert f"job {label} (sh) failed: exit status 3" in title and label.startswith("1_")
    lines = body.splitlines()
    assert any(line.startswith("command:") and "exit 3" in line for line in lines)
    assert any(line.startswith("GPU:") and line.endswith(", 1G") for line in lines)
    assert any(line.startswith("ended:") for line in lines)
    begins = f"  {label.partition('_')[2]} begins"
    first = lines.index("The end of its output:") + 1
    assert lines[first : first + 3] == [begins, "  no such file", ""]
    assert lines[-1] == f"gpulease logs {label} shows its output."
    assert "The end of" not in of_last and "command:   echo done" in of_last
    assert receiver.kinds == ["failure", "success"]


def test_run_takes_the_events_of_the_users_file_and_warns_without_a_receiver(
    make_daemon: Callable[..., Daemon], tmp_path: Path, receiver: Receiver
) -> None:
    lines = 'events = ["end"]', f'urls = ["{receiver.url}"]', 'time_left = "1s"'
    daemon = with_receivers(make_daemon, tmp_path, *lines)
    variables = {**os.environ, **daemon.environment}
    for quick in ("on", "off"):
        environment = {**variables, "GPULEASE_QUICK_PARSER": quick}
        done = daemon.run("run", "--mem", "1G", "true", env=environment)
        assert done.stderr == ""
        assert (
            daemon.run("run", "--mem", "1G", "--notify", "none", "true", env=environment).stderr
            == ""
        )
    daemon.run("run", "--mem", "1G", "true", env=variables)
    wait_for("the last one is announced", lambda: "job 5 (true) succeeded" in receiver.titles)
    wrong = daemon.run("run", "--mem", "1G", "--notify", "ends", "true", env=variables, check=False)
    assert wrong.returncode == 2 and "no event named 'ends'" in wrong.stderr
    configure(tmp_path, 'events = ["ends"]', lines[1])
    refused = daemon.run("notify", "--test", env=variables, check=False)
    assert refused.returncode == 78 and "no event named 'ends'" in refused.stderr
    configure(tmp_path, lines[1], 'quiet = "22:00-07:00"')
    assert "from 22:00 to 07:00" in daemon.run("notify", env=variables).stdout
    shown = json.loads(daemon.run("notify", "--json", env=variables).stdout)
    assert (shown["quiet"], shown["events"]) == ("22:00-07:00", [])
    assert [each["name"] for each in shown["receivers"]] == ["url 1 (json)"]
    configure(tmp_path)
    assert json.loads(daemon.run("notify", "--json", env=variables).stdout)["receivers"] == []
    done = daemon.run("run", "--mem", "1G", "--notify", "all", "true", env=variables)
    assert "no receiver is configured" in done.stderr and "notify --test" in done.stderr
    assert receiver.titles == [f"job {number} (true) succeeded" for number in (1, 3, 5)]


@needs_root
def test_admins_hear_of_drained_gpus_and_of_a_daemon_that_was_killed(
    make_daemon: Callable[..., Daemon], tmp_path: Path, receiver: Receiver
) -> None:
    daemon = with_receivers(
        make_daemon, tmp_path, f'urls = ["{receiver.url}"]',
        settings={"grace": "2s"}, tables='[notify]\nadmins = ["root", "nobody-here"]\n',
    )  # fmt: skip
    daemon.client.drain("0", why="new fan")
    daemon.client.resume("0")
    wait_for("both are announced", lambda: len(receiver.titles) == 2)
    assert receiver.titles == ["GPU 0 was drained", "GPU 0 was resumed"]
    assert "new fan" in receiver.got[0][1]
    daemon.kill()
    daemon.start()
    wait_for("so is the crash", lambda: len(receiver.titles) == 3)
    assert "crashed or was killed" in receiver.titles[2]
    daemon.kill(signal.SIGTERM)
    daemon.start()
    daemon.client.drain("1")
    wait_for("a later message arrives", lambda: "GPU 1 was drained" in receiver.titles)
    assert len(receiver.titles) == 4, "a stop is no trouble"
    assert "no user named 'nobody-here'" in daemon.log


@needs_root
def test_admins_hear_of_passes_that_fail_once(tmp_path: Path, receiver: Receiver) -> None:
    home, fail = configure(tmp_path, f'urls = ["{receiver.url}"]'), tmp_path / "fail"
    environment = {"PASSES_FAIL": str(fail), "XDG_CONFIG_HOME": str(home / ".config")}
    daemon = FailingDaemon(
        tmp_path, settings={"grace": "2s"}, tables='[notify]\nadmins = ["root"]\n',
        environment=environment,
    )  # fmt: skip
    try:
        daemon.start()
        fail.touch()
        daemon.submit("--mem", "1G", "--", "true")
        wait_for("it is announced", lambda: receiver.titles)
        wait_for("others fail as well", lambda: fail.stat().st_size > 3)
        assert receiver.titles == ["cannot grant leases now; trying again"]
    finally:
        fail.unlink(missing_ok=True)
        daemon.end_all()


# With other users. The Python of a test run may be where only root can read, so the daemon runs in
# a mount namespace in which all users can.

_OPEN = """
set -e
hidden=$1; shift
mkdir -p "$1"; kept=$1; shift
count=0
for each; do
    [ "$each" = -- ] && break
    mkdir -p "$kept/$count"; mount --rbind "$each" "$kept/$count"; count=$((count + 1))
done
[ "$hidden" = / ] || mount -t tmpfs -o mode=755 none "$hidden"
count=0
while [ "$1" != -- ]; do
    mkdir -p "$1"; mount --rbind "$kept/$count" "$1"; count=$((count + 1)); shift
done
shift
exec "$@"
"""


def opened(folder: Path, command: list[str]) -> list[str]:
    """Return a command that runs where all users can read the Python of this test run."""
    needed = {Path(sys.prefix), Path(sys.base_prefix), ROOT}
    closed = [each for part in needed for each in part.parents if not each.stat().st_mode & 0o001]
    hidden = min(closed, key=lambda each: len(each.parts), default=Path("/"))
    within = [each for each in needed if hidden in each.parents and hidden != Path("/")]
    outer = sorted(each for each in within if not any(other in each.parents for other in within))
    arguments = [str(hidden), str(folder / "kept"), *map(str, outer), "--", *command]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _OPEN, "sh", *arguments]


@dataclass
class OpenDaemon(Daemon):
    """A daemon that other users' programs run below."""

    def command(self) -> list[str]:
        return opened(self.folder, super().command())


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as made:
        yield made


@contextmanager
def users(folder: Path, *names: str) -> Iterator[list[int]]:
    """Make users with homes below `folder`, and remove them afterwards."""
    uids = []
    try:
        for name in names:
            home = folder / name
            make = ["useradd", "--create-home", "--home-dir", str(home), "--shell", "/bin/sh", name]
            subprocess.run(make, check=True)
            home.chmod(0o700)
            uids.append(home.stat().st_uid)
        yield uids
    finally:
        for name in names:
            subprocess.run(["userdel", "--force", name], check=False, capture_output=True)


def configure_as(uid: int, home: Path, *lines: str) -> None:
    configure(home, *lines)
    subprocess.run(["chown", "-R", str(uid), str(home / ".config")], check=True)


@needs_root
def test_each_user_has_receivers_of_their_own_and_one_that_hangs_delays_no_other(
    folder: Path, receiver: Receiver
) -> None:
    alice, bob = f"gln{os.getpid() % 100000}a", f"gln{os.getpid() % 100000}b"
    with users(folder, alice, bob) as (first, second):
        spool = folder / "spool"
        spool.mkdir()
        spool.chmod(0o1777)
        hangs = f"id -u > {spool}/alice; sleep 600"
        configure_as(first, folder / alice, f'command = ["sh", "-c", "{hangs}"]')
        secret = folder / alice / ".config" / "gpulease" / "config.toml"
        configure_as(
            second, folder / bob, f'urls = ["{receiver.url}"]',
            f'command = ["sh", "-c", "id -u > {spool}/bob; cat {secret} '
            f'/proc/$(cat {spool}/sender)/environ >> {spool}/bob 2>&1; true"]',
        )  # fmt: skip
        made = OpenDaemon(folder, settings={"grace": "2s"})
        daemon = made.start()
        try:
            submitted = job("true", memory=1 << 30, notify=["end"])
            assert call(daemon, first, "POST", "/v1/jobs", submitted)[0] == 201
            wait_for("that of alice hangs", (spool / "alice").exists)
            sender = next(
                pid for pid in pids_of_senders() if Path(f"/proc/{pid}").stat().st_uid == first
            )
            (spool / "sender").write_text(str(sender))
            assert call(daemon, second, "POST", "/v1/jobs", submitted)[0] == 201
            wait_for("bob gets his", lambda: receiver.titles)
            wait_for("both of them", (spool / "bob").exists)
            wait_for("it is written", lambda: "denied" in (spool / "bob").read_text())

            assert receiver.titles == ["job 2 (true) succeeded"]
            assert (spool / "alice").read_text() == f"{first}\n"
            said = (spool / "bob").read_text().splitlines()
            assert said[0] == str(second)
            assert len(said) == 3 and all("Permission denied" in each for each in said[1:])
            for each in (
                daemon.state / "notifications",
                *(daemon.state / "notifications").iterdir(),
            ):
                assert each.stat().st_mode & 0o077 == 0 and each.stat().st_uid == 0
            os.kill(sender, signal.SIGKILL)
        finally:
            made.end_all()


def test_the_owner_of_an_idle_job_is_notified_once_another_waits(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    command = f'command = ["sh", "-c", "cat >> {tmp_path}/said"]'
    settings = {"idle_after": "1s"}
    daemon = with_receivers(make_daemon, tmp_path, command, simulate="1x1G", settings=settings)
    number = daemon.submit("--mem", "900M", "--notify", "idle", "--", "sleep", "600")
    wait_for("it is idle", lambda: daemon.job(number)["idle_since_at"])
    daemon.submit("--mem", "900M", "--", "true")
    wait_for("it is sent", (tmp_path / "said").exists)
    wait_for("all is sent", lambda: not attempts(daemon))
    said = (tmp_path / "said").read_text()
    assert f"job {number} (sleep) is idle\n\n" in said
    assert f"gpulease cancel {number}" in said


@pytest.mark.parametrize(
    ("kind", "sequence"),
    [("osc9", b"\x1b]9;gpulease: job "), ("osc777", b"\x1b]777;notify;gpulease;job ")],
)
def test_a_terminal_is_told_of_the_end_of_a_job_that_took_a_while(
    make_daemon: Callable[..., Daemon], kind: str, sequence: bytes
) -> None:
    daemon = make_daemon().start()
    line = daemon.gpulease("run", "--mem", "1G", "--desktop", kind, "--name", "a;b", "sleep", "6")
    pid, master = pty.fork()
    if pid == 0:
        os.execve(line[0], line, {**os.environ, "TERM": "xterm"})
    said = bytearray()
    with suppress(OSError):  # the terminal has closed
        while piece := os.read(master, 65536):
            said += piece
    os.close(master)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, bytes(said)
    assert sequence in said
    assert said.endswith(b" (a,b) has ended\x07")
