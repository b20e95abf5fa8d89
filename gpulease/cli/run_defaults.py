"""Options of `gpulease run` that are not typed: in the user's file, in the script, in a variable.

The table [run] of the user's file has the long names of options as keys; the events of [notify] are
a default for --notify. GPULEASE_RUN_OPTIONS has options as they are typed, and so have comments of
the script. The command line takes precedence over the variable, the variable over the script, and
the script over the file, as Slurm has it for variables and #SBATCH.

Inside a job none of them applies, except with --new-lease: a command there uses the lease of the
job, and the usual size or time limit would only be refused.
"""

from __future__ import annotations

import os

from gpulease.cli.quick_parser import NotUnderstood, read, read_value
from gpulease.cli.script import options_in_script
from gpulease.errors import BadConfiguration, BadUsage, CommandNotExecutable, CommandNotFound
from gpulease.locations import personal_config
from gpulease.options import OPTIONS
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Any

    from gpulease.errors import GpuleaseError

VARIABLE = "GPULEASE_RUN_OPTIONS"
_LEASED = "GPULEASE_JOB"
_RUN, _NOTIFY = "run", "notify"
_EXCLUSIVE = {"wait": "no_wait", "no_wait": "wait"}
"""Options that exclude each other: the typed one replaces a default for the other."""
_TYPED_ONLY = {"no_defaults", "socket"} | {
    name for name, each in OPTIONS.items() if each.is_typed_only
}
"""Parameters without a default. A socket is trusted, so only the command line may name it."""
_NOT_IN_A_SCRIPT = _TYPED_ONLY - {"array"} | {"no_script_options"}
"""Parameters that a script cannot set. An array belongs to its script, which reads the index."""
_QUOTES = frozenset("'\"\\")
_WITHOUT = "gpulease run --no-defaults ignores it"
_WITHOUT_SCRIPT = "gpulease run --no-script-options ignores options in scripts"


@record(frozen=True)
class Default:
    """A value for an option."""

    value: Any
    """As the parser of the command line returns it."""
    option: str
    """Such as "--mem"."""
    source: str
    is_of_script: bool = False

    def __str__(self) -> str:
        """Return the option as it is typed."""
        from shlex import quote

        if isinstance(self.value, bool):
            return self.option if self.value else f"--no-{self.option.removeprefix('--')}"
        values = self.value if isinstance(self.value, list) else [self.value]
        return " ".join(f"{self.option} {quote(str(each))}" for each in values)


def users_defaults(typed: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Default]:
    """Return the defaults that apply to a line with the `typed` values, by parameter.

    Raises:
        BadUsage: the file, the script or the variable has a mistake.
    """
    if environment.get(_LEASED) and not typed.get("new_lease"):
        return {}
    file: Mapping[str, Default] = {}
    variable: Mapping[str, Default] = {}
    if not typed.get("no_defaults"):
        file, variable = dict(_from_file(environment)), dict(_from_variable(environment))
    switch = variable.get("no_script_options") or file.get("no_script_options")
    ignores_script = typed.get("no_script_options", switch is not None and switch.value)
    script = {} if ignores_script else _from_script(typed.get("command") or ())
    found: dict[str, Default] = {}
    for layer in (file, script, variable):
        found = _without_replaced(found, layer) | dict(layer)
    if str(typed.get("retries")) == "0":  # typer has read no values yet
        found = {name: each for name, each in found.items() if name not in _OF_RETRIES}
    return _without_replaced(found, typed)


_OF_RETRIES = frozenset({"retry_on", "retry_delay"})
"""Options that are refused without retries, which --retries 0 switches off."""


def _without_replaced(found: Mapping[str, Default], by: Mapping[str, Any]) -> dict[str, Default]:
    """Return defaults without those that options of a higher rank exclude."""
    replaced = {_EXCLUSIVE[name] for name in by if name in _EXCLUSIVE}
    return {name: each for name, each in found.items() if name not in replaced}


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
        kinds = dict.fromkeys(each.is_of_script for each in culprits or others)
        switches = (
            _WITHOUT_SCRIPT if is_of_script else "gpulease run --no-defaults ignores defaults"
            for is_of_script in kinds
        )
        parts = [error.hint, *sources, *switches]
        error.hint = "; ".join(part for part in parts if part)


def _is_named(default: Default, error: GpuleaseError) -> bool:
    import re

    value = str(default.value)
    # A single character or digit is too common to mean the option.
    words = [default.option, *([value] if len(value) > 1 else [])]
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", error.message) for word in words)


def read_options(words: Sequence[str], refused: Collection[str] = _TYPED_ONLY) -> dict[str, Any]:
    """Return the values of words that are options of `run` only.

    Raises:
        NotUnderstood: they are not, or one is `refused`: it has to be typed.
    """
    values = read("run", words)
    if rest := values.get("command"):
        raise NotUnderstood(f"{rest[0]!r} is no option")
    for name in values:
        if name in refused:
            long = OPTIONS[name].long if name in OPTIONS else f"--{name}"
            raise NotUnderstood(f"{long} has to be typed")
    return values


def _read(
    text: str, source: str, example: str, refused: Collection[str] = _TYPED_ONLY
) -> Mapping[str, Any]:
    """Return the options in a text; `source` and `example` are for the error.

    Raises:
        BadUsage: they cannot be read, or one is `refused`.
    """
    try:
        return read_options(_split(text), refused)
    except (NotUnderstood, ValueError) as error:
        from gpulease.drawing.words import clean

        why = str(error)
        raise BadUsage(
            f"cannot use {clean(source)}: {why[:1].lower()}{why[1:]}",
            f"write options as for gpulease run: {example}",
        ) from None


def _from_variable(environment: Mapping[str, str]) -> Iterator[tuple[str, Default]]:
    text = environment.get(VARIABLE, "")
    example = f'{VARIABLE}="--growth --mem 4G"; {_WITHOUT}'
    for name, value in _read(text, f'{VARIABLE}="{text}"', example).items():
        yield name, Default(value, OPTIONS[name].long, VARIABLE)


def _from_script(command: Sequence[str]) -> dict[str, Default]:
    found: dict[str, Default] = {}
    for text, where in options_in_script(command):
        example = f"# gpulease: --mem 4G; {_WITHOUT_SCRIPT}"
        values = _read(text, f"the options in {where}", example, _NOT_IN_A_SCRIPT)
        for name, value in values.items():
            before = found[name].value if name in found and OPTIONS[name].is_list else []
            whole = [*before, *value] if before else value
            found[name] = Default(whole, OPTIONS[name].long, where, is_of_script=True)
    return found


def _split(text: str) -> list[str]:
    if _QUOTES.isdisjoint(text):
        return text.split()
    from shlex import split  # which imports re

    return split(text)


def _from_file(environment: Mapping[str, str]) -> Iterator[tuple[str, Default]]:
    try:
        path = personal_config(environment)
    except OSError:  # a home that this user cannot read
        path = None
    if path is None:
        return
    content = _content(path)
    notify = content.get(_NOTIFY)
    if isinstance(notify, dict) and (events := notify.get("events")):
        yield _default(path, _NOTIFY, "notify", events)
    table = content.get(_RUN, {})
    if not isinstance(table, dict):
        raise BadUsage(
            f"cannot use [{_RUN}] in {path}: {_RUN} is a table",
            f'write [{_RUN}], and below it mem = "4G"',
        )
    for key, value in table.items():
        yield _default(path, _RUN, key, value)


def _content(path: str) -> Mapping[str, Any]:
    """Return what the file has; nothing if it has no defaults, as its words show at once."""
    if not os.path.isfile(path):  # a FIFO would never end
        raise BadUsage(f"cannot read {path}: it is not a regular file", _WITHOUT)
    with open(path, "rb") as file:
        text = file.read()
    if _RUN.encode() not in text and _NOTIFY.encode() not in text:
        return {}
    from pathlib import Path

    from gpulease.setting_parsers import read_toml

    try:
        return read_toml(Path(path))
    except BadConfiguration as error:
        raise BadUsage(error.message, error.hint or _WITHOUT) from None


def _default(path: str, table: str, key: str, value: object) -> tuple[str, Default]:
    """Return the parameter that a key of the file names, and its value."""
    option = "--" + key.replace("_", "-")
    flags = {each.long: name for name, each in OPTIONS.items() if name != "no_defaults"}
    if option not in flags:
        raise BadUsage(
            f"cannot use [{table}] in {path}: {key}: no option named {option}", _similar(key, flags)
        )
    name = flags[option]
    try:
        if name in _TYPED_ONLY:
            raise NotUnderstood(f"{option} has to be typed")
        read_as = _value(name, value)
    except NotUnderstood as error:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        why = f"{key} = {shown}: {error}"
        raise BadUsage(f"cannot use [{table}] in {path}: {why}", _WITHOUT) from None
    return name, Default(read_as, option, f"[{table}] in {path}")


_SHOWN = 40


def _value(name: str, value: object) -> Any:
    """Return a value of the file as the parser of the command line returns it.

    Raises:
        NotUnderstood: it is of the wrong type.
    """
    option = OPTIONS[name]
    if option.is_flag != isinstance(value, bool):
        raise NotUnderstood("write true or false" if option.is_flag else "write a text or a number")
    if option.is_flag:
        return value
    values = value if isinstance(value, list) else [value]
    if not values:
        raise NotUnderstood("the list is empty; write at least one value, or remove the line")
    if any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in values):
        raise NotUnderstood("write a text or a number")
    found = [read_value(option, str(each)) for each in values]
    return found if option.is_list else found[-1]


def _similar(key: str, flags: Mapping[str, Any]) -> str:
    from difflib import get_close_matches

    known = [flag.removeprefix("--") for flag in flags]
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "gpulease run --help lists the options"
    return f"{hint}; {_WITHOUT}"
