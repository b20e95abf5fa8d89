"""Read the words of a command line: text, whole numbers, paths, one of a few.

Recent versions of typer read them by building a pydantic model of each, which costs more than all
else that `gpulease status` does. Where typer has the place for it, these readers take it; where it
has none, its own do the same.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

_PLACE = "_runtime_param"


class QuickCommand(TyperCommand):
    """A command whose options and arguments are read without pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help included."""
        return without_types(read_quickly(super().get_params(ctx)))


class QuickGroup(TyperGroup):
    """A group of commands whose own options are read without pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help included."""
        return read_quickly(super().get_params(ctx))


def read_quickly(params: list[Any]) -> list[Any]:
    """Give each its reader, if there is one for its type and typer has a place for it."""
    for param in params:
        if getattr(param, _PLACE, param) is None:
            reader = reader_of(param.type_descriptor.annotation)
            setattr(param, _PLACE, None if reader is None else _Quick(reader))
    return params


def without_types(params: list[Any]) -> list[Any]:
    """Keep the help from calling an argument `list[int]`, where typer would: its text says what."""
    for param in params:
        if param.param_type_name == "argument" and hasattr(param, "display_type_rich"):
            param.display_type_rich = _no_type
    return params


def _no_type(ctx: Any) -> str:
    return ""


class _Quick:
    """What typer asks to read the value of a parameter."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        try:
            return self._read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=param) from None


def reader_of(annotation: Any) -> Callable[[Any], Any] | None:
    """Return what reads a word as `annotation`; None for what only typer knows."""
    if get_origin(annotation) is list:
        read = reader_of(get_args(annotation)[0])
        return None if read is None else lambda words: [read(word) for word in words]
    if get_origin(annotation) is Literal:
        return lambda word: _one_of(get_args(annotation), word)
    readers: dict[Any, Callable[[Any], Any]] = {
        str: str,
        int: _whole_number,
        Path: Path,
        bool: _as_it_is,
    }
    return readers.get(annotation)


def _as_it_is(value: Any) -> Any:
    return value


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
