"""Options and arguments for typer: those that verbs share, and those of the tables of options."""

from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from gpulease.cli.verbs import options_of_verb
from gpulease.options import Option

Verb = TypeVar("Verb", bound=Callable[..., object])

JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB",
        help="Numbers or names: 17, 3-7, 17_3 (an element of array 17), 'last' (your newest).",
        show_default=False,
    ),
]


def _declared(option: Option) -> Any:
    """Return the type of an option of a table, with what typer has to know of it."""
    panel = None if option.panel == "Options" else option.panel
    settings = typer.Option(
        *option.flags, metavar=option.metavar, help=option.help, rich_help_panel=panel,
        show_default=False,
    )  # fmt: skip
    return Annotated[_type_of(option), settings]


def _type_of(option: Option) -> Any:
    if option.is_list:
        return list[str] | None
    kinds: dict[str, Any] = {"str": str, "int": int, "bool": bool}
    kind = Literal[option.choices] if option.choices else kinds[option.annotation.split(" ")[0]]
    return kind | None if option.default is None else kind


SocketOption = Annotated[
    Path | None,
    typer.Option(
        "--socket", metavar="PATH", help="Use the daemon on this socket.", show_default=False
    ),
]


def named_socket(ctx: typer.Context, socket: Path | None) -> Path | None:
    """Return the value of --socket, which may stand before the verb or after it."""
    before: Path | None = ctx.find_root().params.get("socket")
    return socket or before


def takes_its_options(verb: Verb) -> Verb:
    """Give a verb its options of the tables, as keyword arguments, before --socket."""
    own = signature(verb, eval_str=True)
    parameters = own.parameters.values()
    first = [each for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    options = [_parameter(*each) for each in options_of_verb(verb.__name__).items()]
    last = [each for each in parameters if each.name == "socket"]
    vars(verb)["__signature__"] = own.replace(parameters=[*first, *options, *last])
    return verb


def _parameter(name: str, option: Option) -> Parameter:
    default = None if option.is_list else option.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=_declared(option))
