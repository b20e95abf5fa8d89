"""From options to a request: what is read, and what is refused before anything is queued."""

import os
import signal
import stat
from dataclasses import asdict
from pathlib import Path

import pytest

from goldens import mentions
from gpulease.cli.caller import Caller, Streams
from gpulease.cli.program import python_of, resolve, shell_of
from gpulease.cli.request import build, refuse_what_execve_would
from gpulease.cli.verbs import options_of_verb
from gpulease.errors import (
    BadValue,
    CommandNotExecutable,
    CommandNotFound,
    GpuleaseError,
    TooLarge,
)
from gpulease.options import RunOptions
from gpulease.record import replace
from gpulease.units import GIB
from gpulease.wire.requests import EarlySignalRequest, TerminalRequest

ME = Caller("/home/me", {"PATH": "/bin"}, 0o027, {"RLIMIT_CORE": -1}, 5)


def options(**changed: object) -> RunOptions:
    return RunOptions(**changed)  # type: ignore[arg-type]


def test_everything_that_was_written_is_in_the_request() -> None:
    written = options(
        mem="4G", gpus=2, exclusive=True, time="1h", name="x", wait="2m", visible="index", split="2"
    )
    request = build(written, ["a", "b"], ME)
    assert (request.claim.memory, request.claim.gpus, request.claim.exclusive) == (4 * GIB, 2, True)
    assert (request.claim.time_limit, request.wait, request.name) == (3600.0, 120.0, "x")
    assert (request.options.visible, request.options.split) == ("index", 2)
    assert (request.umask, request.nice, request.soft_limits) == (0o027, 5, {"RLIMIT_CORE": -1})
    assert request.attached
    of_the_machine = build(options(ram="32G", cpus=8), ["a"], ME).claim
    assert (of_the_machine.ram, of_the_machine.cpus) == (32 * GIB, 8)


def test_a_split_has_equal_parts_or_sizes() -> None:
    equal = build(options(split="3"), ["a"], ME).options
    assert (equal.split, equal.split_sizes) == (3, [])
    sizes = build(options(split="1G, 512M"), ["a"], ME).options
    assert (sizes.split, sizes.split_sizes) == (2, [GIB, GIB // 2])


def test_no_memory_leaves_it_to_the_daemon() -> None:
    claim = build(options(), ["a"], ME).claim
    assert (claim.memory, claim.share) == (None, None)


def test_an_option_of_again_takes_back_what_the_job_had_but_for_one_that_says_no() -> None:
    flags = options_of_verb("again")
    assert flags["growth"].flags == ("--growth/--no-growth",)
    assert flags["no_wait"].flags == ("--no-wait",)


def test_no_wait_is_zero_and_neither_is_for_ever() -> None:
    assert build(options(no_wait=True), ["a"], ME).wait == 0.0
    assert build(options(), ["a"], ME).wait is None


@pytest.mark.parametrize(
    "changed",
    [
        {"mem": "4X"},
        {"mem": "0"},
        {"retry_oom": "more"},
        {"retry_on": ["more"]},
        {"time": "soon"},
        {"wait": "0s"},
        {"wait": "1m", "no_wait": True},
        {"split": "0"},
        {"split": "1G,2"},
        {"grace": "soon"},
        {"shell": True},
        {"early_signal": "USR1", "time": "1h"},
        {"early_signal": "@60", "time": "1h"},
        {"early_signal": "65@60", "time": "1h"},
        {"early_signal": "USR1@0", "time": "1h"},
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(changed: dict[str, object]) -> None:
    with pytest.raises(BadValue) as refused:
        build(options(**changed), ["a"], ME)
    assert refused.value.message


@pytest.mark.parametrize(
    ("written", "number", "before"),
    [
        ("USR1@120s", signal.SIGUSR1, 120.0),
        ("34@1m30s", 34, 90.0),
        ("SIGINT@00:05:00", signal.SIGINT, 300.0),
    ],
)
def test_a_signal_ahead_of_the_end_is_read(written: str, number: int, before: float) -> None:
    request = build(options(early_signal=written, time="1h", grace="5m"), ["a"], ME)
    assert vars(request.early_signal) == asdict(EarlySignalRequest(int(number), before))
    assert request.grace == 300.0


HERE = Streams(True, True, True, (40, 100), (1, 2, 3))
OUT_ELSEWHERE = replace(HERE, stdout=False)


@pytest.mark.parametrize(
    ("changed", "streams", "terminal"),
    [
        ({}, HERE, TerminalRequest(40, 100, [1, 2, 3])),
        ({}, replace(HERE, stderr=False), TerminalRequest(40, 100, [1, 2, 3], stderr=False)),
        ({}, OUT_ELSEWHERE, None),
        ({}, Streams(), None),
        ({"detach": True}, HERE, None),
        ({"detach": True, "pty": True}, HERE, TerminalRequest(40, 100, [1, 2, 3])),
        ({"detach": True, "pty": True}, Streams(), TerminalRequest(24, 80)),
        ({"pty": True}, OUT_ELSEWHERE, TerminalRequest(40, 100, [1, 2, 3])),
        ({"pty": False}, HERE, None),
    ],
)
def test_a_job_gets_a_terminal_where_its_caller_has_one_or_asks_for_one(
    changed: dict[str, object], streams: Streams, terminal: TerminalRequest | None
) -> None:
    made = build(options(**changed), ["a"], replace(ME, streams=streams)).terminal
    assert (made and vars(made)) == (terminal and asdict(terminal))


def test_bytes_that_are_no_text_survive() -> None:
    assert build(options(), [os.fsdecode(b"\xff\xc3\xa9")], ME).argv == ["\xff\xc3\xa9"]


def test_the_largest_variables_are_named_when_there_is_too_much() -> None:
    environment = {f"V{number}": "x" * 110_000 for number in range(90)} | {"BIG": "x" * 120_000}
    with pytest.raises(TooLarge) as refused:
        refuse_what_execve_would(["true"], environment)
    assert mentions(refused.value.message, "BIG", "118K", "V")


def test_one_string_may_not_be_over_128k() -> None:
    refuse_what_execve_would(["a", "x" * (128 * 1024 - 1)], {})
    with pytest.raises(TooLarge, match="1"):
        refuse_what_execve_would(["a", "x" * (128 * 1024)], {})
    with pytest.raises(TooLarge, match="V"):
        refuse_what_execve_would(["a"], {"V": "x" * (128 * 1024)})


def program(path: Path, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path


def test_a_script_runs_under_the_active_environment_then_the_path(tmp_path: Path) -> None:
    program(tmp_path / "train.py", 0o644)
    first = program(tmp_path / "bin" / "python3")
    path = {"PATH": str(first.parent)}
    assert resolve(["train.py", "-x"], tmp_path, path) == (str(first), "train.py", "-x")
    active = program(tmp_path / "venv" / "bin" / "python")
    environment = path | {"VIRTUAL_ENV": str(tmp_path / "venv")}
    assert resolve(["train.py"], tmp_path, environment)[0] == str(active)
    active.unlink()
    assert python_of(tmp_path, environment) == str(first)


@pytest.mark.parametrize(
    ("name", "mode", "text", "runs_itself"),
    [
        ("./train.py", 0o755, "#!/usr/bin/env python3\n", True),
        ("train.py", 0o755, "#!/usr/bin/env python3\n", False),
        ("./train.py", 0o644, "#!/usr/bin/env python3\n", False),
        ("./train.py", 0o755, "import os\n", False),
    ],
)
def test_a_script_names_its_own_python_only_where_a_shell_would_look(
    name: str, mode: int, text: str, runs_itself: bool, tmp_path: Path
) -> None:
    python = program(tmp_path / "bin" / "python3")
    script = program(tmp_path / name, mode)
    script.write_text(text)
    found = resolve([name, "-x"], tmp_path, {"PATH": str(python.parent)})
    assert found == ((name, "-x") if runs_itself else (str(python), name, "-x"))


def test_the_shell_is_the_users_own(tmp_path: Path) -> None:
    mine = program(tmp_path / "fish")
    assert shell_of({"SHELL": str(mine)}) == str(mine)
    assert shell_of({"SHELL": "/nowhere/zsh"}) in ("/bin/bash", "/bin/sh")
    assert shell_of({}) in ("/bin/bash", "/bin/sh")


def test_a_script_that_is_only_on_the_path_runs_as_itself(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "infer.py")
    assert resolve(["infer.py"], tmp_path, {"PATH": str(tmp_path / "bin")}) == ("infer.py",)


@pytest.mark.parametrize(
    ("name", "mode", "error", "hint"),
    [
        ("missing.py", None, CommandNotFound, "relative to that directory"),
        ("missing", None, CommandNotFound, "before the command"),
        ("./missing", None, CommandNotFound, "relative to"),
        ("tool", 0o755, CommandNotFound, "./tool"),
        ("sweep.sh", 0o644, CommandNotFound, "bash sweep.sh"),
        ("gpu.ipynb", 0o644, CommandNotFound, "activate the environment"),
        ("./tool", 0o644, CommandNotExecutable, "chmod +x"),
        ("", None, CommandNotFound, ""),
        ("./", None, CommandNotExecutable, ""),
    ],
)
def test_what_cannot_run_is_said_before_it_is_queued(
    name: str, mode: int | None, error: type[GpuleaseError], hint: str, tmp_path: Path
) -> None:
    if mode is not None:
        program(tmp_path / name, mode)
    with pytest.raises(error) as refused:
        resolve([name], tmp_path, {"PATH": "/nowhere"})
    assert hint in (refused.value.hint or "")
    assert refused.value.exit_code == (127 if error is CommandNotFound else 126)


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        (["python3", "nofile.py"], CommandNotFound, ["nofile.py", "--after"]),
        (["python3", "-u", "-W", "ignore", "nofile.py", "x"], CommandNotFound, ["nofile.py"]),
        (["python3.11", "-Xdev", "--", "nofile.py"], CommandNotFound, ["nofile.py"]),
        (["train.py --epochs 3"], CommandNotFound, ["run -- train.py --epochs 3"]),
        (["a && b"], CommandNotFound, ["bash -c 'a && b'"]),
        (["it's me"], CommandNotFound, ["spelling"]),
        (["cd", "data"], CommandNotFound, ["before gpulease run", "bash -c 'cd data && COMMAND'"]),
        (["SEED=1", "train.py"], CommandNotFound, ["env SEED=1 train.py"]),
        (["python", "train.py"], CommandNotFound, ["run -- python3 train.py"]),
        (["data"], CommandNotFound, ["data/FILE"]),
        (["./data"], CommandNotExecutable, ["directory"]),
        (["./gone"], CommandNotExecutable, ["/opt/old/bin/python", "first line"]),
        (["gone-by-env"], CommandNotExecutable, ["python9", "PATH"]),
        (["./options-by-env"], CommandNotExecutable, ["env -S python3 -u"]),
        (["./windows"], CommandNotExecutable, ["python3", r"sed -i 's/\r$//' ./windows"]),
    ],
)
def test_what_is_certain_to_fail_is_refused_with_what_to_type(
    line: list[str], error: type[GpuleaseError], words: list[str], tmp_path: Path
) -> None:
    environment = scripts(tmp_path)
    with pytest.raises(error) as refused:
        resolve(line, tmp_path, environment)
    assert mentions(refused.value.text(), *words)
    assert "chmod" not in refused.value.text()


@pytest.mark.parametrize(
    "line",
    [
        ["python3", "train.py"],
        ["python3", "-m", "nofile.py"],
        ["python3", "-Bc", "nofile.py"],
        ["python3", "-i"],
        ["python3", "-W", "ignore", "-Xdev", "train.py"],
        ["pypy3", "--jit", "off", "train.py"],
        ["python3-config", "nofile.py"],
        ["bash", "nofile.sh"],
        ["bash", "-c", "nofile.py"],
        ["./options-after-tab"],
        ["./options-by-env-S"],
        ["./variable-by-env"],
        ["./without-interpreter"],
    ],
)
def test_what_may_work_is_not_refused_and_nothing_is_said(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = scripts(tmp_path)
    assert resolve(line, tmp_path, environment) == tuple(line)
    assert capsys.readouterr().err == ""


def test_what_may_be_there_at_the_start_is_noted_and_line_ends_of_windows_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = scripts(tmp_path)
    for line, word in ((["python3", "nofile.py"], "nofile.py"), (["./gone"], "/opt/old")):
        assert resolve(line, tmp_path, environment, must_exist=False) == tuple(line)
        assert word in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    resolve(["bash", "pipe"], tmp_path, environment)  # which nobody writes
    resolve(["bash", "windows.sh"], tmp_path, environment)
    assert mentions(capsys.readouterr().err, "windows.sh", "sed -i")


def scripts(folder: Path) -> dict[str, str]:
    """Write scripts and programs of many kinds, and return an environment that finds some."""
    for name, text in {
        "bin/python3": "#!/bin/sh\n",
        "bin/python3.11": "#!/bin/sh\n",
        "bin/python3-config": "#!/bin/sh\n",
        "bin/bash": "#!/bin/sh\n",
        "bin/pypy3": "#!/bin/sh\n",
        "bin/tool": "#! /bin/sh -e\n",
        "bin/gone-by-env": "#!/usr/bin/env python9\n",
        "train.py": "",
        "data/__main__.py": "",
        "gone": "#!/opt/old/bin/python\n",
        "options-after-tab": "#!\t/bin/sh\t-e\n",
        "options-by-env": "#!/usr/bin/env python3 -u\n",
        "options-by-env-S": "#!/usr/bin/env -S python3 -u\n",
        "variable-by-env": "#!/usr/bin/env -S A=1 python9\n",
        "without-interpreter": "echo hello\n",
        "windows": "#!/usr/bin/env python3\r\n",
        "windows.sh": "cd x\r\n",
    }.items():
        program(folder / name).write_bytes(text.encode())
    return {"PATH": str(folder / "bin")}


def test_a_program_on_the_path_without_permission_is_126(tmp_path: Path) -> None:
    path = program(tmp_path / "bin" / "tool", stat.S_IRUSR)
    with pytest.raises(CommandNotExecutable) as refused:
        resolve(["tool"], tmp_path, {"PATH": str(path.parent)})
    assert f"chmod +x {path}" in (refused.value.hint or "")
