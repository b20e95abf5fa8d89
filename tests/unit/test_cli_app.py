"""The edge of the command: how lines are understood, and how errors leave it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease import __version__
from gpulease.cli import commands
from gpulease.cli.app import call
from gpulease.cli.help_page import SHORT
from gpulease.cli.verbs import VERBS, options_of_verb

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_teaches_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([verb, "--help"]) == 0
    assert f"  gpulease {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_the_help_of_every_verb_fits_a_terminal(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call([verb, "--help"] if verb else ["--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "list[" not in said
    assert "...}" not in said, "how often a word may stand is said behind it"
    # Every option says what it is for.
    for line in said.partition("Options:")[2].splitlines():
        assert not re.fullmatch(r" {2}-\S+( [A-Z@]+)?", line), line


@pytest.mark.parametrize("line", [["--help"], *([verb, "--help"] for verb in SHORT)], ids=" ".join)
def test_the_first_help_fits_a_screen_and_takes_no_typer(
    line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call(line) == 0
    quick = capsys.readouterr().out
    assert quick.count("\n") <= 23, "the prompt takes the last line"
    monkeypatch.setenv("GPULEASE_QUICK_PARSER", "off")
    assert call(line) == 0
    assert capsys.readouterr().out == quick


@pytest.mark.parametrize("verb", SHORT)
def test_all_options_of_a_verb_are_described(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([verb, "--help-all"]) == 0
    said = capsys.readouterr().out
    assert all(
        option.flags[0].partition("/")[0] in said for option in options_of_verb(verb).values()
    )


def test_the_help_names_every_verb_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--help"]) == 0
    words = re.findall(r"[a-z]+", capsys.readouterr().out.split("COMMAND")[0])
    assert set(VERBS) <= set(words)


def test_no_pointer_hides_a_verb_and_each_points_to_one() -> None:
    for word, pointer in commands._SUGGESTIONS.items():
        assert word not in VERBS
        named = re.findall(r"gpulease (\w+)", pointer)
        assert named and set(named) <= set(VERBS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "Usage: gpulease"),
        (["statsu"], "did you mean gpulease status?"),
        (["nonsense"], "no such command"),
        (["ps"], "gpulease list lists jobs"),
        (["queue"], "gpulease list lists jobs"),
        (["TOP"], "did you mean gpulease top?"),
        (["smi"], "gpulease status shows GPUs"),
        (["kill", "17"], "gpulease cancel ends jobs"),
        (["rm", "17"], "gpulease cancel ends jobs"),
        (["submit", "x"], "gpulease run runs a command"),
        (["exec", "x"], "gpulease run runs a command"),
        (["info"], "gpulease show describes a job"),
        (["train.py"], "gpulease run train.py"),
        (["--nonsense"], "no such option"),
        (["run"], "no COMMAND is given"),
        (["run", "--nonsense", "x"], "gpulease run --help"),
        (["list", "--last"], "gpulease list --help"),
        (["run", "--gpus", "two", "x"], "'two' is not a whole number"),
        (["run", "--visible", "both", "x"], "'both' is not one of uuid, index"),
        (["cancel"], "no job to cancel"),
        (["cancel", "17", "--all"], "exclude each other"),
        (["attach", "17", "18"], "several jobs"),
        (["extend", "17"], "no span of time"),
        (["list", "--state", "gone"], "is not one of queued"),
        (["list", "--limit", "-3"], "a number from 1"),
        (["status", "--queue", "-1"], "that is no number"),
        (["history", "--limit", "0"], "a number from 1 to"),
        (["logs", "--tail", "-1", "17"], "cannot print -1 lines"),
    ],
)
def test_a_line_that_cannot_be_understood_is_exit_2(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(line) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "line", [["--socket", "/no/such", "status"], ["status", "--socket", "/no/such"]]
)
def test_the_socket_may_be_named_before_the_verb_or_after(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(line) == 125
    assert "/no/such" in capsys.readouterr().err


def test_options_after_the_command_are_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "--mem", "1G", "no-such-command", "--gpus", "x", "--help"]) == 127
    assert call(["run", "--", "no-such-command", "--", "-x"]) == 127


def test_a_missing_command_is_127_with_no_daemon_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(["--socket", "/no/such", "run", "./missing.sh"]) == 127
    assert "missing.sh" in capsys.readouterr().err


def test_the_version_costs_no_import() -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gpulease.cli", "--version"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=True,
    )
    assert ran.stdout == f"gpulease {__version__} (development)\n"
    assert "typer" not in ran.stderr
