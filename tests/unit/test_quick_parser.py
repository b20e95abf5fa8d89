"""What the quick parser reads is what typer reads; the rest it leaves to typer."""

from typing import Any

import pytest
import typer

from gpulease.cli import commands
from gpulease.cli.everyday_options import OPTIONS
from gpulease.cli.quick_parser import options_of, parse, with_defaults

UNDERSTOOD = [
    "status", "status --json", "status --queue 5 --json", "status --queue=all",
    "list --all --user alice --state time-limit", "list --state=queued --json", "show 17 18_3 last",
    "show --name sweep* --json", "show -- -name", "show 17 --json 18", "cancel --all --grace 5s",
    "cancel last", "run true", "run -- true", "run --mem 4G train.py --epochs 3 --mem 5G",
    "run --mem=4G --gpus 2 --gpu 1 --gpu 2,3 -- a -- b", "run -d --no-pty --name x y", "run a -- b",
    "run --pty --no-pty x", "run --priority low --nice 5 --after 3 --after 4:any x", "run - x",
    "run --wait 5m --shell", "run --inter-op-threads 4 --growth x", "run --nice -5 x",
    "run --no-growth x",
]  # fmt: skip
LEFT_TO_TYPER = [
    "", "--help", "--version", "-h", "status --help", "status -h", "status 17", "status --jso",
    "status --json=yes", "status --queue", "status --queue -1", "list --state gone",
    "list --state time_limit", "list --user", "doctor", "ps", "run --gpus two x",
    "run --gpus 9999999999 x", "run -dx y", "run -d=1 y",
    "run --mem", "run --mem -- x",
    "--socket", "--socket /x", "--socket=/x status", "run --memm 1 x",
]  # fmt: skip


def by_typer(verb: str, words: list[str]) -> dict[str, Any]:
    command = typer.main.get_command(commands.app).get_command(typer.Context, verb)
    found = command.make_context(verb, words).params
    return {name: None if value == () else value for name, value in found.items()}


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("GPULEASE_RUN_OPTIONS", raising=False)


@pytest.mark.parametrize("line", UNDERSTOOD)
def test_a_plain_line_is_read_as_typer_reads_it(line: str) -> None:
    verb, *words = line.split()
    parsed = parse([verb, *words])
    assert parsed is not None
    assert (parsed[0], with_defaults(*parsed)) == (verb, by_typer(verb, words))


@pytest.mark.parametrize("line", LEFT_TO_TYPER)
def test_all_else_is_left_to_typer(line: str) -> None:
    assert parse(line.split()) is None


def test_the_socket_may_be_named_before_the_verb_or_after() -> None:
    assert parse(["--socket", "/a", "status"]) == ("status", {"socket": "/a"})
    assert parse(["--socket", "/a", "status", "--socket", "/b"]) == ("status", {"socket": "/b"})


@pytest.mark.parametrize("verb", OPTIONS)
def test_the_table_has_each_option_of_the_verb(verb: str) -> None:
    params = [each for each in commands.parameters(verb) if each.param_type_name == "option"]
    names = {name for each in params if each.name != "help" for name in each.opts}
    assert names <= options_of(verb).keys()
