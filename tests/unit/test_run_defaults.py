"""Options of `run` that are not typed: in the user's file, the script, the variable; what wins."""

import os
from pathlib import Path
from typing import Any

import pytest
import typer

from goldens import sentence
from gpulease.cli import commands
from gpulease.cli.app import call
from gpulease.errors import BadUsage


class User:
    """A user with a configuration, a variable and a command line."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "gpulease" / "config.toml"
        self._monkeypatch = monkeypatch
        for name in ("GPULEASE_RUN_OPTIONS", "GPULEASE_JOB"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))

    def writes(self, text: str) -> None:
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(text)

    def exports(self, value: str, name: str = "GPULEASE_RUN_OPTIONS") -> None:
        self._monkeypatch.setenv(name, value)

    def types(self, *words: str) -> dict[str, Any]:
        """Return the values of the options of `gpulease run` with these words."""
        command = typer.main.get_command(commands.app).get_command(typer.Context, "run")
        return dict(command.make_context("run", list(words)).params)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(tmp_path, monkeypatch)


def test_the_command_line_wins_over_the_variable_and_that_over_the_file(user: User) -> None:
    user.writes('[run]\nmem = "1G"\ngpus = 2\nname = "from-file"\ntime = "1h"')
    user.exports("--gpus 3 --name 'from variable'")

    found = user.types("--name", "typed", "x")

    assert [found[name] for name in ("mem", "gpus", "name", "time")] == ["1G", 3, "typed", "1h"]
    assert found["growth"] is False


@pytest.mark.parametrize(
    ("entry", "name", "value"),
    [
        ("growth = true", "growth", True),
        ("pty = false", "pty", False),
        ("inter_op_threads = 4", "inter_op_threads", 4),
        ('gpus = "2"', "gpus", 2),
        ("mem = 5", "mem", "5"),
        ('visible = "index"', "visible", "index"),
        ('after = ["3", "4:any"]', "after", ["3", "4:any"]),
        ("no-wait = true", "no_wait", True),
    ],
)
def test_each_kind_of_option_has_a_key(user: User, entry: str, name: str, value: object) -> None:
    user.writes(f"[run]\n{entry}")

    assert user.types("x")[name] == value


def test_a_flag_is_switched_off_by_its_opposite(user: User) -> None:
    user.writes("[run]\ngrowth = true\nstrict = true\nexclusive = true\npty = true")
    user.exports("--no-strict")

    found = user.types("--no-growth", "--no-pty", "x")

    assert [found[name] for name in ("growth", "strict", "exclusive", "pty")] == [
        False, False, True, False,
    ]  # fmt: skip


def test_no_defaults_ignores_both_even_with_mistakes(user: User) -> None:
    user.writes("[run]\ngrowht = true")
    user.exports("--nonsense")

    assert user.types("--no-defaults", "x")["growth"] is False


@pytest.mark.parametrize(
    ("entry", "typed", "kept"),
    [('wait = "30m"', ["--no-wait"], ("no_wait", True)),
     ("no-wait = true", ["--wait", "5m"], ("wait", "5m"))],
)  # fmt: skip
def test_an_option_replaces_the_one_that_it_excludes(
    user: User, entry: str, typed: list[str], kept: tuple[str, object]
) -> None:
    user.writes(f"[run]\n{entry}")

    found = user.types(*typed, "x")

    assert {name: found[name] for name in ("wait", "no_wait") if found[name]} == dict([kept])


def test_inside_a_job_only_a_new_lease_has_defaults(user: User) -> None:
    user.exports("--mem 4G")
    user.exports("17", "GPULEASE_JOB")

    assert user.types("x")["mem"] is None
    assert user.types("--new-lease", "x")["mem"] == "4G"


def test_what_follows_the_command_is_the_commands(user: User) -> None:
    user.exports("--mem 4G")

    found = user.types("train.py", "--no-defaults", "--mem", "5G")

    assert (found["mem"], found["command"]) == ("4G", ["train.py", "--no-defaults", "--mem", "5G"])


@pytest.mark.parametrize(
    ("label", "entry"),
    [
        ("unknown", "growht = true"),
        ("socket", 'socket = "/run/other.sock"'),
        ("flag", 'growth = "yes"'),
        ("table", "mem = {size = 4}"),
        ("number", 'gpus = "many"'),
        ("choice", 'visible = "name"'),
        ("dry-run", "dry-run = true"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(user: User, label: str, entry: str) -> None:
    user.writes(f"[run]\n{entry}")

    with pytest.raises(BadUsage) as refused:
        user.types("x")

    sentence(f"run-file-{label}", refused.value.text().replace(str(user.file), "config.toml"))


@pytest.mark.parametrize("text", ["run = 3", "[run", "[run]\nmem = \n"])
def test_a_file_that_cannot_be_read_is_named(user: User, text: str) -> None:
    user.writes(text)

    with pytest.raises(BadUsage, match=r"config\.toml"):
        user.types("x")


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("unknown", "--growht"),
        ("no-value", "--growth --mem"),
        ("command", "--growth train.py"),
        ("quote", "--name 'x"),
        ("socket", "--socket /run/other.sock"),
        ("detach", "-d"),
    ],
)
def test_a_mistake_in_the_variable_is_named_with_it(user: User, label: str, value: str) -> None:
    user.exports(value)

    with pytest.raises(BadUsage) as refused:
        user.types("x")

    sentence(f"run-variable-{label}", refused.value.text())


def test_an_error_about_a_default_names_its_source(
    user: User, capsys: pytest.CaptureFixture[str]
) -> None:
    user.writes('[run]\nname = "sweep"')
    user.exports("--mem 4X --gpus 2")

    assert call(["--socket", "/nowhere", "run", "x"]) == 2

    sentence("run-default-error", capsys.readouterr().err.removesuffix("\n"))


def test_an_error_about_what_was_typed_names_no_other_source(
    user: User, capsys: pytest.CaptureFixture[str]
) -> None:
    user.exports("--mem 4X --gpus 2")

    assert call(["--socket", "/nowhere", "run", "--mem", "5X", "x"]) == 2

    shown = capsys.readouterr().err
    assert "4X" not in shown
    assert "defaults in effect: --gpus 2 (GPULEASE_RUN_OPTIONS)" in shown


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('[notify]\nevents = ["fail"]', ["--mem", "5X", "x"]),
        ("[run]\ngpus = 2", ["no-such-script.py"]),
    ],
)
def test_an_error_does_not_list_defaults_that_cannot_be_its_cause(
    user: User, capsys: pytest.CaptureFixture[str], settings: str, words: list[str]
) -> None:
    user.writes(settings)

    assert call(["--socket", "/nowhere", "run", *words]) in {2, 127}

    shown = capsys.readouterr().err
    assert "hint:" in shown
    assert "default" not in shown


def test_the_help_shows_defaults_and_their_sources(
    user: User, capsys: pytest.CaptureFixture[str]
) -> None:
    user.writes('[run]\nmem = "4G"')
    user.exports("--growth")
    assert call(["run", "--help-all"]) == 0
    shown = capsys.readouterr().out.partition("Your defaults:")[2]
    assert "--mem 4G" in shown
    assert "GPULEASE_RUN_OPTIONS" in shown

    user.exports("--nonsense")
    assert call(["run", "--help-all"]) == 0


@pytest.mark.parametrize("target", ["/dev/zero", "fifo"])
def test_a_file_that_never_ends_is_refused(user: User, target: str) -> None:
    user.file.parent.mkdir()
    if target == "fifo":
        os.mkfifo(user.file)
    else:
        user.file.symlink_to(target)
    with pytest.raises(BadUsage):
        user.types("true")


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ('[notify]\nevents = ["end", "oom"]', ["end", "oom"]),
        ('[notify]\nevents = "end"\nurls = ["slack://a/#b", "x://c\'d"]', ["end"]),
        ('[notify]\nevents = ["end"]\n[run]\nmem = "1G"\nnotify = "fail"', ["fail"]),
        ('[run]\nnotify = ["fail"]\n[notify]\nevents = ["end"]', ["fail"]),
        ('[notify]\nmail = "me@example.org"\n[other]\nevents = ["end"]', ()),
    ],
)
def test_the_events_of_the_table_notify_are_a_default(
    user: User, text: str, events: object
) -> None:
    user.writes(text)
    assert user.types("x")["notify"] == events
    assert user.types("--notify", "none", "x")["notify"] == ["none"]


def test_a_mistake_in_the_events_names_their_table(user: User) -> None:
    user.writes("[notify]\nevents = 3.5\n")
    assert user.types("x")["notify"] == ["3.5"], "the daemon refuses it"
    user.writes("[notify]\nevents = []\n")
    assert user.types("x")["notify"] == ()
    user.writes("[notify]\nevents = true\n")
    with pytest.raises(BadUsage, match=r"\[notify\] in "):
        user.types("x")


# Options in the script.


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the script of a command is; the commands run in its folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def test_the_comments_at_the_top_of_a_script_have_options(user: User, script: Path) -> None:
    script.write_bytes(
        b"\xef\xbb\xbf#!/usr/bin/env python3\r\n# -*- coding: utf-8 -*-\r\n"
        b"# gpulease: --mem 4G --name 'my sweep' --notify end\r\n\r\n"
        b"#gpulease: --notify oom --array 0-3\r\n"
        b"## gpulease: --gpus 8\r\n# see gpulease: --gpus 9\r\n"
        b"import os  # gpulease: --gpus 7\r\n# gpulease: --growth\r\n"
    )
    found = user.types("train.py", "--epochs", "3")
    named = ("mem", "name", "notify", "array", "gpus", "growth", "command")
    assert [found[name] for name in named] == [
        "4G", "my sweep", ["end", "oom"], "0-3", None, False, ["train.py", "--epochs", "3"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "has_options"),
    [
        ("./train.py", True),
        ("python -u train.py", True),
        ("torchrun --nproc-per-node 2 train.py", True),
        ("cat train.py", False),
        ("python -c train.py", False),
        ("python -m train", False),
        ("no-such.py", False),
        (" ".join(["true", *["x"] * 40, "train.py"]), False),
    ],
)
def test_the_script_is_found_as_for_a_snapshot(
    user: User, script: Path, command: str, has_options: bool
) -> None:
    script.write_text("# gpulease: --mem 4G\n")
    assert (user.types(*command.split())["mem"] == "4G") is has_options


def test_the_line_and_the_variable_win_over_the_script_and_that_over_the_file(
    user: User, script: Path
) -> None:
    script.write_text("# gpulease: --mem 1G --gpus 1 --time 1h --growth --wait 5m\n")
    user.writes('[run]\nmem = "2G"\ntime = "2h"\nno-wait = true\nname = "file"')
    user.exports("--gpus 3")
    found = user.types("--mem", "4G", "--no-growth", "train.py")
    named = ("mem", "gpus", "time", "growth", "wait", "no_wait", "name")
    assert [found[name] for name in named] == ["4G", 3, "1h", False, "5m", False, "file"]
    assert user.types("--no-wait", "train.py")["wait"] is None
    script.write_text("# gpulease: --retries 3 --retry-on 7\n")
    assert not user.types("--retries", "0", "train.py")["retry_on"]


def test_options_of_a_script_can_be_ignored_and_do_not_apply_inside_a_job(
    user: User, script: Path
) -> None:
    script.write_text("# gpulease: --mem 4G --nonsense\n")
    assert user.types("--no-script-options", "train.py")["mem"] is None
    user.writes("[run]\nno-script-options = true")
    assert user.types("train.py")["mem"] is None
    user.exports("--no-no-script-options")
    with pytest.raises(BadUsage):
        user.types("train.py")
    user.exports("17", "GPULEASE_JOB")
    assert user.types("train.py")["mem"] is None


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("unknown", "--growht"),
        ("command", "--growth train.py"),
        ("quote", "--name 'x"),
        ("detach", "-d"),
        ("no-defaults", "--no-defaults"),
    ],
)
def test_a_mistake_in_a_script_is_named_with_file_and_line(
    user: User, script: Path, label: str, text: str
) -> None:
    script.write_text(f"#!/bin/sh\n# gpulease: {text}\n")
    with pytest.raises(BadUsage) as refused:
        user.types("train.py")
    sentence(f"run-script-{label}", refused.value.text())


def test_options_of_a_script_without_a_colon_are_no_silent_comment(
    user: User, script: Path
) -> None:
    script.write_text("# gpulease is used here\n# gpulease run --mem 4G train.py\n")
    assert user.types("train.py")["mem"] is None
    script.write_text("#!/bin/sh\n# gpulease --mem 4G\n")
    with pytest.raises(BadUsage) as refused:
        user.types("train.py")
    sentence("run-script-colon", refused.value.text())


def test_an_error_about_an_option_of_a_script_names_its_line(
    script: Path, user: User, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("# gpulease: --mem 4X\n")
    assert call(["--socket", "/nowhere", "run", "train.py"]) == 2
    sentence("run-script-error", capsys.readouterr().err.removesuffix("\n"))


def test_only_the_beginning_of_a_regular_file_is_read(user: User, script: Path) -> None:
    filler = "# " + "x" * 61 + "\n"
    script.write_text(
        filler * 1023 + "# gpulease: --mem 4G" + filler * 9 + "# gpulease: --growth\n"
    )
    assert user.types("train.py")["mem"] is None, "the line is cut"
    script.write_text(filler * 1022 + "# gpulease: --mem 4G\n" + filler * 9 + "# gpulease: -d\n")
    assert user.types("train.py")["mem"] == "4G"
    script.unlink()
    os.mkfifo(script)
    assert user.types("train.py")["mem"] is None
