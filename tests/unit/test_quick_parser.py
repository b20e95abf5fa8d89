"""What the quick parser reads is what typer reads; the rest it leaves to typer."""

from typing import Any

import pytest
import typer

from gpulease.cli import commands
from gpulease.cli.quick_parser import options_of, parse, with_defaults
from gpulease.cli.verbs import VERBS, arguments_of_verb

UNDERSTOOD = [
    "status", "status --json", "status --queue 5 --json", "status --queue=all",
    "list --all --user alice --state time-limit", "list --state=queued --json", "show 17 18_3 last",
    "show --name sweep* --json", "show -- -name", "show 17 --json 18", "cancel --all --grace 5s",
    "cancel last", "run true", "run -- true", "run --mem 4G train.py --epochs 3 --mem 5G",
    "run --mem=4G --gpus 2 --gpu 1 --gpu 2,3 -- a -- b", "run -d --no-pty --name x y", "run a -- b",
    "run --pty --no-pty x", "run --priority low --nice 5 --after 3 --after 4:any x", "run - x",
    "run --wait 5m --shell", "run --inter-op-threads 4 --growth x", "run --nice -5 x",
    "run --no-growth x", "edit 17 18 --mem 6G --time none --nice -5 --no-held --same-model",
    "edit last --gpu 1 --gpu 2,3 --priority low", "move 17 --before 12", "requeue 3-7",
    "keep 17", "keep --all --for 4h", "drain 0 GPU-5 --why fans", "resume 1", "pause", "unpause",
    "reserve --gpu 0 --gpu 1 --from +1h --for 2h -u a --user b", "reserve", "report --by week -a",
    "hold --mem 4G --for 2h --pid 12 --shell csh --json",
]  # fmt: skip
LEFT_TO_TYPER = [
    "", "--help", "--version", "-h", "status --help", "status -h", "status 17", "status --jso",
    "status --json=yes", "status --queue", "status --queue -1", "list --state gone",
    "list --state time_limit", "list --user", "doctor", "ps", "run --gpus two x",
    "run --gpus 9999999999 x", "run -dx y", "run -d=1 y",
    "run --mem", "run --mem -- x",
    "--socket", "--socket /x", "--socket=/x status", "run --memm 1 x",
    "extend", "drain", "completion", "completion tcsh", "completion zsh bash", "pause now",
    "report --by day", "hold --pid x", "adopt 4711", "edit --first",
]  # fmt: skip


def command_of(verb: str) -> Any:
    return typer.main.get_command(commands.app).get_command(typer.Context, verb)


def by_typer(verb: str, words: list[str]) -> dict[str, Any]:
    found = command_of(verb).make_context(verb, words).params
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


@pytest.mark.parametrize("verb", VERBS)
def test_the_table_has_each_option_and_argument_of_the_verb(verb: str) -> None:
    context = typer.Context(command_of(verb), info_name=verb)
    params = command_of(verb).get_params(context)
    options = [each for each in params if each.param_type_name == "option" and each.name != "help"]
    assert {name for each in options for name in each.opts} <= options_of(verb).keys()
    arguments = [each for each in params if each.param_type_name == "argument"]
    assert [
        (each.metavar.split(".")[0], each.nargs == -1, each.required) for each in arguments
    ] == [(each.metavar, each.is_list, each.is_required) for each in arguments_of_verb(verb)]
