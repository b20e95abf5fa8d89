"""Launches that fail say why, in a sentence, and leave a record that says the same."""

import asyncio
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from daemon_rig import wait_for
from goldens import mentions
from gpulease.errors import (
    CommandNotExecutable,
    CommandNotFound,
    GpuleaseError,
    LaunchFailed,
)
from gpulease.host.launch import Launch
from gpulease.host.launcher import AlreadyLaunched, Launcher
from gpulease.shim.record import Exited, is_alive, read_record
from process_rig import (
    PATH,
    end,
    finish,
    launch_of,
    output,
    python,
    run,
    shell,
    start,
)


def refusal(launch: Launch) -> GpuleaseError:
    with pytest.raises(GpuleaseError) as caught:
        start(launch)
    return caught.value


def recorded_end(directory: Path) -> Exited:
    record = read_record(directory)
    assert record is not None and record.exited is not None
    return record.exited


def test_a_command_that_is_not_on_the_path(directory: Path) -> None:
    error = refusal(launch_of(directory, "no-such-command"))

    assert isinstance(error, CommandNotFound)
    assert mentions(error.message, "no-such-command", "PATH")
    assert PATH["PATH"] in (error.hint or "")


def test_a_failed_launch_is_recorded_as_ended(directory: Path) -> None:
    error = refusal(launch_of(directory, "no-such-command"))

    ended = recorded_end(directory)
    assert (ended.reason, ended.exit_code) == ("launch_failed", 127)
    assert ended.failed is not None and ended.failed.message == error.message
    assert end(directory) == ended
    # The shim ends a moment after it has written its last word.
    wait_for("the shim has ended", lambda: not is_alive(directory))


@pytest.mark.parametrize("command", ["./no-such-file", "/etc/passwd/x"])
def test_a_path_that_does_not_exist(directory: Path, command: str) -> None:
    error = refusal(launch_of(directory, command))

    assert isinstance(error, CommandNotFound)
    assert command in error.message


def test_a_file_that_is_not_executable(directory: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n")

    error = refusal(launch_of(directory, "./train.sh", cwd=str(tmp_path)))

    assert isinstance(error, CommandNotExecutable)
    assert "./train.sh" in error.message
    assert "chmod +x ./train.sh" in (error.hint or "")
    assert recorded_end(directory).exit_code == 126


def test_a_directory_is_no_command(directory: Path) -> None:
    error = refusal(launch_of(directory, "/tmp"))

    assert isinstance(error, CommandNotExecutable)
    assert mentions(error.message, "/tmp", "directory")


def test_a_script_whose_interpreter_is_missing(directory: Path, tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)

    error = refusal(launch_of(directory, str(script)))

    assert isinstance(error, CommandNotExecutable)
    assert "interpreter" in error.message


def test_a_script_without_a_first_line_is_run_by_the_shell(directory: Path, tmp_path: Path) -> None:
    script = tmp_path / "plain"
    script.write_text('echo "$# $2"\nexit 8\n')
    script.chmod(0o755)

    ended = finish(launch_of(directory, "plain", "a", "b c", environment={"PATH": str(tmp_path)}))

    assert ended.exit_code == 8
    assert output(directory) == "2 b c\n"


def test_a_later_directory_of_the_path_makes_up_for_an_earlier(
    directory: Path, tmp_path: Path
) -> None:
    for number, mode in enumerate((0o644, 0o755)):
        (tmp_path / str(number)).mkdir()
        command = tmp_path / str(number) / "train"
        command.write_text(f"#!/bin/sh\necho {number}\n")
        command.chmod(mode)
    path = f"/no/such:{tmp_path}/0:{tmp_path}/1"

    finish(launch_of(directory, "train", environment={"PATH": path}))

    assert output(directory) == "1\n"


def test_without_a_path_the_usual_places_are_searched(directory: Path) -> None:
    assert finish(launch_of(directory, "true", environment={})).exit_code == 0


def test_a_directory_to_start_in_that_was_removed(directory: Path, tmp_path: Path) -> None:
    error = refusal(shell(directory, "true", cwd=str(tmp_path / "gone")))

    assert isinstance(error, LaunchFailed)
    assert mentions(error.message, f"{tmp_path}/gone", "No such file or directory")
    assert recorded_end(directory).exit_code == 125


def test_arguments_that_are_too_long(directory: Path) -> None:
    error = refusal(launch_of(directory, "/bin/true", "x" * (1 << 20)))

    assert isinstance(error, LaunchFailed)
    assert error.message


def test_a_large_environment_arrives_whole(directory: Path) -> None:
    count = min(2 << 20, resource.getrlimit(resource.RLIMIT_STACK)[0] // 4 - (1 << 16)) // 100_000
    environment = {f"V{number}": "x" * 100_000 for number in range(count)}
    program = "import os; print(sum(len(v) for k, v in os.environ.items() if k[0] == 'V'))"

    finish(python(directory, program, environment=environment))

    assert int(output(directory)) == count * 100_000


def test_bytes_that_are_no_text_survive(directory: Path, tmp_path: Path) -> None:
    odd = b"caf\xe9\xff\xed\xa0\x80"
    place = os.fsencode(tmp_path) + b"/" + odd
    os.mkdir(place)  # noqa: PTH102 - pathlib takes no bytes
    program = (
        "import os, sys; print(repr((os.fsencode(sys.argv[1]), os.environb[b'ODD\\xfe'], "
        "os.getcwdb())))"
    )
    launch = python(
        directory,
        program,
        cwd=os.fsdecode(place),
        environment={os.fsdecode(b"ODD\xfe"): os.fsdecode(odd)},
    )
    given = launch.invocation
    finish(replace(launch, invocation=replace(given, argv=(*given.argv, os.fsdecode(odd)))))

    assert output(directory) == f"{(odd, odd, place)!r}\n"


def test_odd_bytes_in_a_refusal_can_be_shown(directory: Path) -> None:
    error = refusal(launch_of(directory, os.fsdecode(b"/caf\xe9")))

    assert "/caf\\xe9" in error.message


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        ((), {}),
        (("a\0b",), {}),
        (("a",), {"": "x"}),
        (("a",), {"x=y": "z"}),
        (("a",), {"x": "a\0b"}),
        (("\ud800",), {}),
    ],
)
def test_what_no_system_call_takes_is_refused(
    directory: Path, argv: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert isinstance(refusal(launch_of(directory, *argv, environment=environment)), LaunchFailed)
    assert read_record(directory) is None


def test_a_job_without_a_directory(tmp_path: Path) -> None:
    error = refusal(shell(tmp_path / "none", "true"))

    assert isinstance(error, LaunchFailed)
    assert "No such file or directory" in error.message


def test_a_directory_that_is_a_link_is_not_trusted(directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)

    assert isinstance(refusal(shell(link, "true")), LaunchFailed)
    assert read_record(directory) is None


def test_no_job_is_launched_twice(directory: Path) -> None:
    finish(shell(directory, "echo once"))

    with pytest.raises(AlreadyLaunched):
        start(shell(directory, "echo twice"))

    assert output(directory) == "once\n"


def test_of_many_launches_at_once_exactly_one_runs(directory: Path) -> None:
    async def race() -> list[object]:
        launchers = [Launcher() for _ in range(3)]
        launch = shell(directory, "echo ran; sleep 1000")
        try:
            return await asyncio.gather(
                *(launcher.launch(launch) for launcher in launchers for _ in range(4)),
                return_exceptions=True,
            )
        finally:
            for launcher in launchers:
                await launcher.close()

    results = run(race())
    assert sum(isinstance(result, AlreadyLaunched) for result in results) == 11, results
    assert output(directory) == "ran\n"
    assert sorted(path.name for path in directory.iterdir()) == [
        "record",
        "socket",
        "stderr",
        "stdout",
    ]


def test_a_launch_in_a_very_deep_directory(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 50] * 10)
    deep.mkdir(parents=True)

    assert finish(shell(deep, "exit 2")).exit_code == 2
