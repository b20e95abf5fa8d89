"""The user's defaults for options of `gpulease run`: from a file, and from a variable for scripts.

The table [run] of the user's file has the long names of options as keys. GPULEASE_RUN_OPTIONS has
options as they are typed. The command line takes precedence over the variable, and the variable
over the file.

Inside a job neither applies, except with --new-lease: a command there uses the lease of the job,
and the user's usual size or time limit would only be refused.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from gpulease import config
from gpulease.cli.caller import environment
from gpulease.cli.quick_defaults import (
    EXCLUSIVE,
    LEASED,
    NOTIFY_TABLE,
    RUN_TABLE,
    VARIABLE,
    Default,
)
from gpulease.cli.typer_extensions import CommandWithDefaults
from gpulease.drawing.words import clean
from gpulease.errors import (
    BadConfiguration,
    BadUsage,
    CommandNotExecutable,
    CommandNotFound,
    GpuleaseError,
)
from gpulease.setting_parsers import read_toml

_WITHOUT = "gpulease run --no-defaults ignores it"
_FOUND = "gpulease.run_defaults"


class CommandWithUsersDefaults(CommandWithDefaults):
    """`run`, with the user's defaults."""

    def defaults(self, ctx: Any, typed: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values for parameters that were not typed.

        Raises:
            BadUsage: the file or the variable has a mistake.
        """
        within = environment().get(LEASED) and not typed.get("new_lease")
        if typed.get("no_defaults") or within:
            return {}
        try:
            found = _from_file(self, ctx) | _from_variable(self, ctx)
        except BadUsage:
            if typed.get("help"):
                return {}
            raise
        replaced = {EXCLUSIVE[name] for name in typed if name in EXCLUSIVE}
        ctx.meta[_FOUND] = {name: each for name, each in found.items() if name not in replaced}
        return {name: each.value for name, each in ctx.meta[_FOUND].items()}

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


def name_sources(error: GpuleaseError, found: Sequence[Default]) -> None:
    """Add to the hint of an error where the defaults come from that it may be about."""
    culprits = [each for each in found if _is_named(each, error)]
    sources = [f"{each} comes from {each.source}" for each in culprits]
    # Which events notify the user, and any default where the command is missing, explain nothing.
    others = [each for each in found if each.option != "--notify"]
    is_of_command = isinstance(error, CommandNotFound | CommandNotExecutable)
    if others and not sources and not is_of_command:
        listed = ", ".join(f"{each} ({each.source})" for each in others)
        sources = [f"defaults in effect: {listed}"]
    if sources:
        parts = [error.hint, *sources, "gpulease run --no-defaults ignores defaults"]
        error.hint = "; ".join(part for part in parts if part)


def _in_effect(ctx: Any) -> list[Default]:
    found: Mapping[str, Default] = ctx.meta.get(_FOUND, {})
    typed = [name for name in found if CommandWithDefaults.was_typed(ctx, name)]
    return [each for name, each in found.items() if name not in typed]


def _is_named(default: Default, error: GpuleaseError) -> bool:
    value = str(default.value)
    # A single character or digit is too common to mean the option.
    words = [default.option, *([value] if len(value) > 1 else [])]
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", error.message) for word in words)


def _from_variable(command: CommandWithUsersDefaults, ctx: Any) -> dict[str, Default]:
    text = environment().get(VARIABLE, "")
    try:
        words = shlex.split(text)
        values = command.read(ctx, words)
    except (ValueError, typer.TyperException) as error:
        raise _bad_variable(text, _reason(error)) from None
    if rest := values.pop("command", None):
        raise _bad_variable(text, f"{rest[0]!r} is no option")
    return {
        name: Default(value, command.long_name(ctx, name), VARIABLE)
        for name, value in values.items()
    }


def _reason(error: ValueError | typer.TyperException) -> str:
    text = error.message if isinstance(error, typer.TyperException) else str(error)
    return text[:1].lower() + text[1:].rstrip(".")


def _bad_variable(text: str, why: str) -> BadUsage:
    return BadUsage(
        f'cannot use {VARIABLE}="{clean(text)}": {why}',
        f'write options as for gpulease run: {VARIABLE}="--growth --mem 4G"; {_WITHOUT}',
    )


def _from_file(command: CommandWithUsersDefaults, ctx: Any) -> dict[str, Default]:
    try:
        path = config.personal_config()
    except (OSError, RuntimeError):  # no home, or one that this user cannot read
        path = None
    if path is None:
        return {}
    if not path.is_file():  # a FIFO would never end
        raise BadUsage(f"cannot read {path}: it is not a regular file", _WITHOUT)
    try:
        content = read_toml(path)
    except BadConfiguration as error:
        raise BadUsage(error.message, error.hint or _WITHOUT) from None
    table = content.get(RUN_TABLE, {})
    if not isinstance(table, dict):
        raise _bad_entry(
            path, f"{RUN_TABLE} is a table", f'write [{RUN_TABLE}], and below it mem = "4G"'
        )
    notify = content.get(NOTIFY_TABLE)
    events = notify.get("events") if isinstance(notify, dict) else None
    found = {}
    if events:
        found = dict([_entry(command, ctx, path, "notify", events, NOTIFY_TABLE)])
    return found | dict(_entry(command, ctx, path, key, value) for key, value in table.items())


def _entry(
    command: CommandWithUsersDefaults,
    ctx: Any,
    path: Path,
    key: str,
    value: object,
    table: str = RUN_TABLE,
) -> tuple[str, Default]:
    """Return the parameter that a key of the file names, and its value."""
    option = "--" + key.replace("_", "-")
    flags = command.long_names(ctx)
    if option not in flags:
        raise _bad_entry(path, f"{key}: no option named {option}", _similar(key, flags))
    name, is_flag = flags[option]
    try:
        words = _words(option, value, is_flag=is_flag)
        read = command.read(ctx, words)
    except (ValueError, typer.TyperException) as error:
        why = f"{key} = {_shown(value)}: {_reason(error)}"
        raise _bad_entry(path, why, _WITHOUT, table) from None
    return name, Default(read[name], option, f"[{table}] in {path}")


def _words(option: str, value: object, *, is_flag: bool) -> Sequence[str]:
    """Return what to type for a value of the file.

    Raises:
        ValueError: it is of the wrong type.
    """
    if is_flag != isinstance(value, bool):
        raise ValueError("write true or false" if is_flag else "write a text or a number")
    if is_flag:
        return [option if value else f"--no-{option.removeprefix('--')}"]
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("the list is empty; write at least one value, or remove the line")
    if any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in values):
        raise ValueError("write a text or a number")
    return [word for each in values for word in (option, str(each))]


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _similar(key: str, flags: Mapping[str, Any]) -> str:
    from difflib import get_close_matches

    known = [flag.removeprefix("--") for flag in flags]
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "gpulease run --help lists the options"
    return f"{hint}; {_WITHOUT}"


def _bad_entry(path: Path, why: str, hint: str, table: str = RUN_TABLE) -> BadUsage:
    return BadUsage(f"cannot use [{table}] in {path}: {why}", hint)
