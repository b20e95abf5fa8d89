"""The verbs and options of `gpulease` as data, for completion, read from the verbs themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import typer

from gpulease.cli.typer_extensions import choices_of

Kind = Literal["flag", "text", "jobs", "gpus", "command", "file", "folder", "user", "choice"]

_KINDS: dict[str, Kind] = {
    "JOB": "jobs",
    "GPU": "gpus",
    "COMMAND": "command",
    "PATH": "file",
    "FILE": "file",
    "DIR": "folder",
    "USER": "user",
}
"""By the word that stands for it in the help."""


@dataclass(frozen=True, slots=True)
class Word:
    """What may stand at one place of a line."""

    kind: Kind
    shown: str
    choices: tuple[str, ...] = ()
    many: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One option, by all its names, and what its value is; a flag has none."""

    names: tuple[str, ...]
    help: str
    value: Word


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb, or what stands before all of them."""

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Word, ...]


def verb_of(name: str, short_help: str, command: Any) -> Verb:
    """Describe a command of typer."""
    context = typer.Context(command, info_name=name, help_option_names=["-h", "--help"])
    params = command.get_params(context)
    shown = [param for param in params if not getattr(param, "hidden", False)]
    return Verb(
        name=name,
        help=short_help.rstrip("."),
        options=tuple(_options(shown)),
        arguments=tuple(_word(p) for p in shown if p.param_type_name == "argument"),
    )


def _options(params: list[Any]) -> Iterator[Option]:
    for param in params:
        if param.param_type_name == "option":
            names = tuple(sorted((*param.opts, *param.secondary_opts), key=len))
            yield Option(names, (param.help or "").rstrip("."), _word(param))


def _word(param: Any) -> Word:
    choices = choices_of(param)
    shown = (param.metavar or param.name or "").strip("[].")
    first = shown.partition(" ")[0].rstrip(".")
    if getattr(param, "is_flag", False):
        kind: Kind = "flag"
    elif choices:
        kind = "choice"
    else:
        kind = _KINDS.get(first, "text")
    return Word(kind, shown, choices, many=param.nargs == -1)
