"""Everything that relies on the inside of typer, which is no public interface and may change.

The bounds on typer in pyproject.toml are those of this module.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from gpulease.cli.help_page import SHORT, help_of_all, short_help
from gpulease.cli.run_defaults import Default, name_sources, users_defaults
from gpulease.cli.signals import EndedByInterrupt
from gpulease.errors import BadUsage, GpuleaseError
from gpulease.locations import environment
from gpulease.options import OPTIONS

_READER = "_runtime_param"
"""Where typer keeps what reads the value of a parameter, once it has built that."""
_DEFAULTS = "gpulease.run_defaults"
ALL_OPTIONS = "--help-all"
"""The object of the context of typer, where the help is to have all options."""
_NEGATIVE = re.compile(r"-\d")


class Command(TyperCommand):
    """A verb: its values are read without pydantic, its options are grouped in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help included."""
        return _without_types(_with_readers(super().get_params(ctx)))

    def get_help(self, ctx: Any) -> str:
        """Return the help: the short one of a verb with many options, unless all are asked for."""
        if ctx.info_name in SHORT and ctx.find_root().obj != ALL_OPTIONS:
            return short_help(ctx.info_name, sys.stdout)
        return str(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options under the heading that each names."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else param.rich_help_panel or "Options"
            if (row := param.get_help_record(ctx)) is not None:
                sections.setdefault(heading, []).append(row)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class CommandWithSpan(Command):
    """A verb with a signed span of time at the end: -30m is a value, not three options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move negative spans behind the options, where nothing is read as an option."""
        end = args.index("--") if "--" in args else len(args)
        before, rest = args[:end], args[end:]
        negative = [word for word in before if _NEGATIVE.match(word)]
        others = [word for word in before if not _NEGATIVE.match(word)]
        moved = [*others, "--", *negative, *rest[1:]] if negative or rest else others
        return list(super().parse_args(ctx, moved))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the line of usage, where all words would be one argument."""
        return ["[OPTIONS]", "[JOB]...", "+SPAN"]


class CommandWithWatch(Command):
    """A verb whose option --watch needs no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; --watch before another option or at the end has an empty value."""
        words = [
            each
            for word, following in pairwise([*args, "-"])
            for each in ((word, "") if word == "--watch" and following[:1] == "-" else (word,))
        ]
        return list(super().parse_args(ctx, words))


class CommandWithDefaults(Command):
    """`run`, with the user's defaults; --no-NAME switches off a flag that a default sets."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, then the defaults."""
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        typed = {name: value for name, value in values.items() if value not in (None, ())}
        try:
            ctx.meta[_DEFAULTS] = users_defaults(typed, environment())
        except BadUsage:
            if not typed.get("help"):
                raise
        defaults = ctx.meta.get(_DEFAULTS, {})
        ctx.default_map = {name: each.value for name, each in defaults.items()}
        return list(super().parse_args(ctx, args))

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser, which also knows the opposite of each flag."""
        parser = super().make_parser(ctx)
        for param in self.get_params(ctx):
            if param.name in OPTIONS and param.is_flag and not param.secondary_opts:
                opposite = f"--no-{OPTIONS[param.name].long[2:]}"
                parser.add_option(param, [opposite], param.name, "store_const", const=False)
        return parser

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; an error about a default says where that comes from."""
        try:
            return super().invoke(ctx)
        except GpuleaseError as error:
            name_sources(error, _in_effect(ctx))
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the defaults that apply."""
        super().format_options(ctx, formatter)
        if rows := [(str(each), f"From {each.source}.") for each in _in_effect(ctx)]:
            with formatter.section("Your defaults"):
                formatter.write_dl(rows)


def _in_effect(ctx: Any) -> list[Default]:
    found: Mapping[str, Default] = ctx.meta.get(_DEFAULTS, {})
    return [each for name, each in found.items() if not was_typed(ctx, name)]


def was_typed(ctx: Any, name: str) -> bool:
    """Tell whether a parameter was given on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class VerbGroup(TyperGroup):
    """The verbs, each built when it is used."""

    verbs: ClassVar[Sequence[str]]

    def build(self, verb: str) -> Any:
        """Return the command of a verb."""
        raise NotImplementedError

    def refuse(self, word: str) -> None:
        """Raise an error that helps, if there is one, for a word that is no verb."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help included."""
        return _with_readers(super().get_params(ctx))

    def get_help(self, ctx: Any) -> str:
        """Return the help of all verbs."""
        return help_of_all(sys.stdout)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of the help."""
        return list(self.verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a verb; None for what is no verb."""
        return self.build(cmd_name) if cmd_name in self.verbs else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb of a command line."""
        if args[0] not in self.verbs:
            self.refuse(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb.

        Raises:
            EndedByInterrupt: Ctrl-C. Typer would exit with 130, and a loop of the shell go on.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise EndedByInterrupt(ctrl_c_typed=False) from None


def choices_of(param: Any) -> tuple[str, ...]:
    """Return the values that a parameter accepts; none if it accepts any."""
    if not hasattr(param, "type_descriptor"):  # before typer 0.29
        return tuple(map(str, getattr(param.type, "choices", ())))
    annotation = param.type_descriptor.annotation
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()


def _with_readers(params: list[Any]) -> list[Any]:
    # Typer would build a pydantic model of each, which takes longer than all of `status`.
    for param in params:
        if getattr(param, _READER, param) is None:
            read = reader_of(param.type_descriptor.annotation)
            setattr(param, _READER, None if read is None else _Reader(read))
    return params


def _without_types(params: list[Any]) -> list[Any]:
    # The help would call an argument `list[str]`; its text says what it is.
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""
    return params


class _Reader:
    """What typer asks to read the value of a parameter."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        try:
            return _within(self._read(value), param)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=param) from None


def _within(value: Any, param: Any) -> Any:
    """Raises: ValueError, for a number outside the bounds that the option names."""
    least, most = getattr(param, "min", None), getattr(param, "max", None)
    if least is not None and value < least:
        raise ValueError(f"{value} is below {least}")
    if most is not None and value > most:
        raise ValueError(f"{value} is above {most}")
    return value


def reader_of(annotation: Any) -> Callable[[Any], Any] | None:
    """Return what reads a word as `annotation`; None for a type that only typer knows."""
    if get_origin(annotation) is list:
        read = reader_of(get_args(annotation)[0])
        return None if read is None else lambda words: [read(word) for word in words]
    if get_origin(annotation) is Literal:
        return lambda word: _one_of(get_args(annotation), word)
    readers: dict[Any, Callable[[Any], Any]] = {
        str: str,
        int: _whole_number,
        Path: Path,
        bool: lambda value: value,
    }
    return readers.get(annotation)


def _whole_number(word: str | int) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number") from None


def _one_of(choices: Sequence[str], word: str) -> str:
    # JSON has time_limit where listings have time-limit, and people type what they have seen.
    found = word if word in choices else word.replace("_", "-").replace(" ", "-")
    if found not in choices:
        raise ValueError(f"{word!r} is not one of {', '.join(choices)}")
    return found
