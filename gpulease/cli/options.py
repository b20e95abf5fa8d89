"""Options and arguments for typer: those that verbs share, and those of the tables of options."""

from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, TypeVar

import typer

from gpulease.cli.everyday_options import OPTIONS
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


def declared(option: Option, **changed: Any) -> Any:
    """Return the type of an option of a table, with what typer has to know of it."""
    settings = {
        "metavar": option.metavar,
        "help": option.help,
        "rich_help_panel": None if option.panel == "Options" else option.panel,
        "show_default": False,
    }
    flags = changed.pop("flags", option.flags)
    return Annotated[_type_of(option), typer.Option(*flags, **(settings | changed))]


def _type_of(option: Option) -> Any:
    if option.is_list:
        return list[str] | None
    kinds: dict[str, Any] = {"str": str, "int": int, "bool": bool}
    kind = Literal[option.choices] if option.choices else kinds[option.annotation.split(" ")[0]]
    return kind | None if option.default is None else kind


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NamePatternOption = declared(OPTIONS["show"]["name"])
AllOption = declared(OPTIONS["show"]["every"])


def takes_its_options(verb: Verb) -> Verb:
    """Give an everyday verb its options of the table, as keyword arguments."""
    return _with(verb, (_parameter(*each) for each in OPTIONS[verb.__name__].items()))


def takes_options_of_hold(verb: Verb) -> Verb:
    """Give a verb the options of `run` that describe a lease without a command."""
    return _with(verb, (_parameter(*each) for each in OPTIONS["run"].items() if each[1].holds))


def takes_options_of_edit(verb: Verb) -> Verb:
    """Give a verb the options that change waiting jobs; what is not given is None."""
    return _with(verb, (_edited(*each) for each in OPTIONS["run"].items() if each[1].edits))


def takes_option(name: str) -> Callable[[Verb], Verb]:
    """Declare one parameter of a verb as `run` has it."""

    def declare(verb: Verb) -> Verb:
        own = signature(verb, eval_str=True)
        parameters = (
            each.replace(annotation=declared(OPTIONS["run"][name])) if each.name == name else each
            for each in own.parameters.values()
        )
        vars(verb)["__signature__"] = own.replace(parameters=list(parameters))
        return verb

    return declare


def _edited(name: str, option: Option) -> Parameter:
    flags = (f"{option.long}/--no-{option.long[2:]}",) if option.is_flag else option.flags
    edited = declared(option, flags=flags, help=option.edits, rich_help_panel=None)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=edited)


def _parameter(name: str, option: Option) -> Parameter:
    default = None if option.is_list else option.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=declared(option))


def _with(verb: Verb, options: Iterator[Parameter]) -> Verb:
    """Put options before the keyword arguments of a verb, which typer then shows in this order."""
    own = signature(verb, eval_str=True)
    parameters = own.parameters.values()
    first = [each for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    last = [each for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    vars(verb)["__signature__"] = own.replace(parameters=[*first, *options, *last])
    return verb
