"""`gpulease run` as a real process, against a daemon and a shim made of plain values."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.shim import ShimStandIn
from daemon_stand_in.terminal import started
from fakes import G
from goldens import mentions
from gpulease.errors import NoRoomNow
from gpulease.wire.frames import FrameKind, frame

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(daemon: StandIn, tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[bytes]] = []

    def start_run(*arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
        options = {"stdin": subprocess.DEVNULL, "cwd": tmp_path, **options}
        processes.append(started(daemon.path, "run", *arguments, **options))
        return processes[-1]

    yield start_run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def active(shim: ShimStandIn) -> Any:
    return views.running(17, directory=str(shim.directory))


@pytest.fixture
def attached(start: Start, daemon: StandIn, shim: ShimStandIn) -> Start:
    """Return what starts a command, which is attached to its job at once."""
    daemon.on_submit = active(shim)
    return start


@pytest.mark.usefixtures("parser")
def test_the_request_says_what_the_caller_is(start: Start, daemon: StandIn, tmp_path: Path) -> None:
    line = ["--mem", "40%", "--gpus", "2", "--time", "1h", "--wait", "30m", "-d"]
    start(*line, "sh", "-c", "x\udcff", env={"FLAG": "\udcfe"}).communicate(timeout=20)
    (request,) = daemon.submitted
    assert request.argv == ["sh", "-c", "x\xff"]
    assert request.cwd == str(tmp_path)
    assert request.environment["FLAG"] == "\xfe"
    assert (request.claim.share, request.claim.memory, request.claim.gpus) == (40.0, None, 2)
    assert (request.claim.time_limit, request.wait, request.attached) == (3600.0, 1800.0, False)
    assert request.soft_limits["RLIMIT_NOFILE"] > 0


def test_without_mem_it_says_what_was_leased(start: Start) -> None:
    _, err = start("-d", "true").communicate(timeout=20)
    assert mentions(err.decode(), "job 17", "4G")


def test_visible_devices_before_run_are_one_line_unless_a_gpu_is_asked_for(start: Start) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "1"}
    out, err = start("--mem", "4G", "-d", "true", env=variables).communicate(timeout=20)
    assert out == b"17\n"
    assert mentions(err.decode(), "CUDA_VISIBLE_DEVICES=1 ", "--gpu 1")
    assert err.count(b"\n") == 1

    _, err = start("--mem", "4G", "--gpu", "1", "-d", "true", env=variables).communicate(timeout=20)
    assert err == b""


def test_defaults_reach_the_request(start: Start, daemon: StandIn, tmp_path: Path) -> None:
    (tmp_path / "gpulease").mkdir()
    (tmp_path / "gpulease" / "config.toml").write_text("[run]\ngrowth = true\ngpus = 2\n")
    variables = {"XDG_CONFIG_HOME": str(tmp_path), "GPULEASE_RUN_OPTIONS": "--mem 5G --gpus 3"}

    start("--mem", "4G", "-d", "true", env=variables).communicate(timeout=20)

    (request,) = daemon.submitted
    assert (request.claim.memory, request.claim.gpus, request.options.growth) == (4 * G, 3, True)


def test_output_arrives_apart_and_byte_for_byte(attached: Start, shim: ShimStandIn) -> None:
    process = attached("--mem", "4G", "true")
    shim.say(FrameKind.STDOUT, bytes(range(256)) * 10)
    shim.say(FrameKind.STDERR, b"oops\r\n\xff")
    shim.exit(code=3)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == (bytes(range(256)) * 10, b"oops\r\n\xff", 3)
    assert shim.hello == {"role": "attach"}


def test_sixteen_mib_pass_each_way(attached: Start, shim: ShimStandIn, tmp_path: Path) -> None:
    sent = os.urandom(1 << 20) * 16
    given = tmp_path / "given"
    given.write_bytes(sent)
    with given.open("rb") as stdin:
        process = attached("--mem", "4G", "cat", stdin=stdin)

    def echo() -> None:
        for begin in range(0, len(sent), 1 << 20):
            shim.say(FrameKind.STDOUT, sent[begin : begin + (1 << 20)])
        shim.until(lambda: shim.stdin_ended)
        shim.exit()

    speaker = threading.Thread(target=echo)
    speaker.start()
    out, _ = process.communicate(timeout=60)
    speaker.join(20)
    assert process.returncode == 0
    assert out == sent
    assert shim.stdin == sent


def test_a_slow_reader_holds_up_the_job_and_loses_nothing(
    attached: Start, shim: ShimStandIn
) -> None:
    process = attached("--mem", "4G", "cat")
    said = threading.Semaphore(0)
    pieces = 64

    def speak() -> None:
        for number in range(pieces):
            shim.say(FrameKind.STDOUT, bytes([number]) * (1 << 16))
            said.release()
        shim.exit()

    speaker = threading.Thread(target=speak)
    speaker.start()
    assert said.acquire(timeout=20), "the command has started"
    taken = 1
    while said.acquire(timeout=0.5):
        taken += 1
    # Nobody has read yet: what a pipe, two buffers and two sockets hold, and no more.
    assert 0 < taken < pieces / 2
    assert process.stdout is not None
    out = process.stdout.read()
    speaker.join(20)
    assert out == b"".join(bytes([number]) * (1 << 16) for number in range(pieces))
    assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({"code": 77}, 77),
        ({"signal": 9}, 137),
        ({"signal": 15, "reason": "time_limit"}, 124),
    ],
)
def test_it_exits_as_the_job_did(
    how: dict[str, Any], status: int, attached: Start, shim: ShimStandIn
) -> None:
    process = attached("--mem", "4G", "true")
    shim.exit(**how)
    assert process.wait(20) == status


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_job(signum: signal.Signals, attached: Start, shim: ShimStandIn) -> None:
    process = attached("--mem", "4G", "true")
    shim.until(lambda: shim.hello is not None)
    process.send_signal(signum)
    shim.until(lambda: shim.signals == [signum])
    shim.exit(code=5)
    assert process.wait(20) == 5


def test_a_second_interrupt_within_a_second_cancels(
    attached: Start, daemon: StandIn, shim: ShimStandIn
) -> None:
    process = attached("--mem", "4G", "true")
    shim.until(lambda: shim.hello is not None)
    process.send_signal(signal.SIGINT)
    shim.until(lambda: shim.signals == [signal.SIGINT])
    process.send_signal(signal.SIGINT)
    daemon.until(lambda: daemon.cancelled == [17])
    shim.exit(signal=15, reason="cancelled")
    assert process.wait(20) == 143


def test_a_lost_terminal_leaves_the_job_running(
    attached: Start, daemon: StandIn, shim: ShimStandIn
) -> None:
    process = attached("--mem", "4G", "true")
    shim.until(lambda: shim.hello is not None)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (129, b"")
    assert shim.signals == []
    assert daemon.cancelled == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_waits_cancels_the_job_and_ends_the_command(
    start: Start, daemon: StandIn, signum: signal.Signals
) -> None:
    process = start("--mem", "4G", "true")
    daemon.until(lambda: daemon.followed == [17])
    process.send_signal(signum)
    _, err = process.communicate(timeout=20)
    assert daemon.cancelled == [17]
    assert process.returncode == -signum
    assert b"job 17" in err


def test_it_says_why_and_for_whom_it_waits(
    start: Start, daemon: StandIn, shim: ShimStandIn
) -> None:
    daemon.put(views.running(12, user="bob"))
    daemon.on_submit = views.job(waits_for=[12], position=2)
    process = start("--mem", "4G", "true", env={"TZ": "UTC"})
    assert process.stderr is not None
    said = process.stderr.readline()
    daemon.put(active(shim))
    shim.exit()
    assert process.wait(20) == 0
    assert all(
        word in said for word in (b"job 17", b"2nd", b"no GPU has 4G free", b"job 12 of bob")
    )


def test_a_daemon_that_goes_and_comes_back_costs_nothing(
    start: Start, daemon: StandIn, shim: ShimStandIn
) -> None:
    process = start("--mem", "4G", "true")
    daemon.until(lambda: daemon.followed == [17])
    daemon.close()
    assert process.stderr is not None
    said = b""
    while b"daemon" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    daemon.jobs[17] = active(shim)
    daemon.open()
    shim.exit(code=4)
    assert process.wait(20) == 4
    assert (said + process.stderr.read()).count(b"daemon") == 2, "that it has gone, and is back"


def test_a_job_that_was_over_before_anyone_attached_is_told_from_its_logs(
    start: Start, daemon: StandIn
) -> None:
    daemon.on_submit = views.over(17, exit_status=9)
    daemon.logs = frame(FrameKind.STDOUT, b"out") + frame(FrameKind.STDERR, b"err")
    process = start("--mem", "4G", "true")
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == (b"out", b"err", 9)


def test_a_shim_that_dies_leaves_the_end_to_the_daemon(
    attached: Start, daemon: StandIn, shim: ShimStandIn
) -> None:
    process = attached("--mem", "4G", "true")
    shim.hang_up()
    daemon.put(views.over(17, exit_status=None, outcome="lost", reason="its shim was killed"))
    _, err = process.communicate(timeout=20)
    assert process.returncode == 125
    assert b"job 17" in err and b"its shim was killed" in err


def test_gave_up_is_75(start: Start, daemon: StandIn) -> None:
    daemon.refusal = NoRoomNow("cannot lease 4G now: no GPU has it free", "wait for it")
    process = start("--mem", "4G", "--no-wait", "true")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert err == b"cannot lease 4G now: no GPU has it free\n\nhint: wait for it\n"


def test_giving_up_later_is_75_too(start: Start, daemon: StandIn) -> None:
    process = start("--mem", "4G", "--wait", "1m", "true")
    daemon.until(lambda: daemon.followed == [17])
    late = views.over(17, None, outcome="gave_up", started_at=None, reason="it waited for 1m")
    daemon.put(late)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert b"job 17" in err and b"it waited for 1m" in err


def test_a_reader_that_leaves_ends_the_job_as_a_pipe_would(
    attached: Start, shim: ShimStandIn
) -> None:
    process = attached("--mem", "4G", "yes")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    shim.say(FrameKind.STDOUT, b"y\n" * 100)
    shim.until(lambda: shim.signals == [signal.SIGPIPE])
    shim.exit(signal=signal.SIGPIPE)
    assert process.wait(20) == 141


@pytest.mark.parametrize(
    ("how", "status"), [({"code": 0}, 1), ({"signal": signal.SIGPIPE}, 1), ({"code": 9}, 9)]
)
def test_output_that_a_full_disk_lost_is_a_failure(
    attached: Start, shim: ShimStandIn, how: dict[str, int], status: int
) -> None:
    with Path("/dev/full").open("w") as full:
        process = attached("--mem", "4G", "seq", "9", stdout=full)
    shim.say(FrameKind.STDOUT, b"9\n")
    shim.exit(**how)
    _, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert err == b"gpulease: cannot write the job's output: No space left on device\n"


def test_a_job_that_ends_before_the_pipe_breaks_has_failed_too(
    attached: Start, shim: ShimStandIn
) -> None:
    process = attached("--mem", "4G", "yes")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    shim.say(FrameKind.STDOUT, b"y\n")
    shim.exit(code=0)
    assert process.wait(20) == 141


def test_a_closed_standard_output_is_a_failure_if_the_job_writes(
    attached: Start, shim: ShimStandIn
) -> None:
    process = attached("--mem", "4G", "true", preexec_fn=lambda: os.close(1))
    shim.say(FrameKind.STDOUT, b"y\n")
    shim.exit(code=0)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"Bad file descriptor" in err


def test_closed_streams_do_not_confuse_it(attached: Start, shim: ShimStandIn) -> None:
    def close_all() -> None:
        for handle in (0, 1, 2):
            os.close(handle)

    process = attached("--mem", "4G", "true", preexec_fn=close_all)
    shim.until(lambda: shim.stdin_ended)
    shim.exit(code=6)
    assert process.wait(20) == 6


def test_a_directory_of_any_length_can_be_attached_to(
    start: Start, daemon: StandIn, tmp_path: Path
) -> None:
    directory = tmp_path / ("d" * 120) / ("e" * 120)
    directory.mkdir(parents=True)
    with ShimStandIn(directory, lambda: daemon.hear_the_end(directory)) as shim:
        daemon.on_submit = replace(active(shim), directory=str(directory))
        process = start("--mem", "4G", "true")
        shim.exit(code=8)
        assert process.wait(20) == 8


def test_a_background_terminal_does_not_stop_it(attached: Start, shim: ShimStandIn) -> None:
    controller, terminal = os.openpty()
    try:
        # A session of its own without a controlling terminal: this terminal is never ours to read.
        process = attached("--mem", "4G", "true", stdin=terminal, start_new_session=True)
        shim.until(lambda: shim.hello is not None)
        shim.exit(code=2)
        assert process.wait(20) == 2
    finally:
        os.close(controller)
        os.close(terminal)
