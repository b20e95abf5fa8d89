"""How the values of the settings file are written: each reader takes the text of one.

All raise `BadValue` for what they cannot read, and `BadConfiguration` for what can be no path.
"""

import re
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpulease.errors import BadConfiguration, BadValue, GpuleaseError
from gpulease.units import parse_size, parse_span

LONGEST_GRACE = timedelta(days=1)
_LARGEST_COUNT = 1_000_000


def read_switch(text: str) -> bool:
    """Read `true` or `false`."""
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise BadValue(f"{text[:40]!r} is neither true nor false", "true, or false") from None


def read_count(text: str) -> int:
    """Read a number from 1 on."""
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) <= _LARGEST_COUNT:
        raise BadValue(
            f"cannot read {text[:40]!r}: it is not a number from 1 to {_LARGEST_COUNT}",
            "write it in digits, without a unit",
        )
    return int(text)


def read_grace(text: str) -> timedelta:
    """Read a span of at most a day."""
    span = parse_span(text)
    if span > LONGEST_GRACE:
        raise BadValue(f"cannot use the grace {text}: it is over a day", "5m, 1h, 1d")
    return span


def read_size(text: str) -> int:
    """Read a size; bytes. Those of the settings are small ones as often as large ones."""
    if text.isascii() and text.isdecimal() and text.strip("0"):
        raise BadValue(
            f"cannot read the size {text[:40]!r}: it has no unit",
            f"did you mean {text[:40]}M, or {text[:40]}G?",
        )
    return parse_size(text)


def read_amount(text: str) -> int:
    """Read a size, or 0 for nothing at all; bytes."""
    return 0 if text == "0" else read_size(text)


def read_path(text: str) -> Path:
    """Read a path."""
    if not text or "\0" in text:
        raise BadConfiguration(f"cannot use the path {text[:40]!r}: no file can be called that")
    return Path(text)


def one_of(*words: str) -> Callable[[str], str]:
    """Return a reader of one of these words."""

    def read(text: str) -> str:
        if text not in words:
            raise BadValue(f"{text[:40]!r} is none of {', '.join(words)}", f'"{words[-1]}"')
        return text

    return read


def read_auto(text: str) -> bool:
    """Read whether something is done where it can be."""
    try:
        return {"auto": True, "off": False}[text.lower()]
    except KeyError:
        raise BadValue(f"{text[:40]!r} is neither auto nor off", "auto, off") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a settings file says.

    Raises:
        BadConfiguration: it cannot be read.
    """
    # Only the daemon reads a file; the command, which starts often, does without.
    import tomllib

    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise BadConfiguration(
            f"cannot read the configuration {path}: there is no such file",
            "leave out --config to run with the defaults",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        # Numbers of thousands of digits, and tables in tables in tables, fail in ways of their own.
        twice = _given_twice(text) if any(word in str(error) for word in _TWICE) else None
        why = str(error) if twice is None else f"{twice[0]} is given twice"
        hint = None if twice is None else f"leave one of them out: lines {twice[1]} and {twice[2]}"
        raise BadConfiguration(f"cannot read the configuration {path}: {why}", hint) from error


_TWICE = ("overwrite", "twice")
"""What the reader says where something is given again."""
_SET, _TABLE = re.compile(r"\s*([\w-]+|\"[^\"]*\")\s*="), re.compile(r"\s*(\[[^\[\]]+\])\s*(?:#|$)")


def _given_twice(text: str) -> tuple[str, int, int] | None:
    """Return the first key, or table, that is given twice, and in which lines.

    The reader of TOML says neither.
    """
    seen: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TABLE.match(line):
            table = name = found.group(1)
        elif found := _SET.match(line):
            name = f"{table} {found.group(1)}".lstrip()
        else:
            continue
        if name in seen:
            return name, seen[name], number
        seen[name] = number
    return None


def read_value(path: Path | None, where: str, value: object, reader: Callable[[str], Any]) -> Any:
    """Return one value of a settings file; `where` is its key, for people.

    Raises:
        BadConfiguration: it cannot be read.
    """
    if not isinstance(value, str | int):
        raise BadConfiguration(f'cannot use the configuration {path}: write {where} = "..."')
    try:
        return reader(str(value))
    except GpuleaseError as error:
        raise BadConfiguration(
            f"cannot use the configuration {path}: {where}: {error.message}", error.hint
        ) from error


def every(path: Path | None, reading: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what each reading returns, by key; those that fail are told of together.

    Each mistake has its hint below it.

    Raises:
        BadConfiguration: some of them failed.
    """
    read: dict[str, Any] = {}
    failed: list[BadConfiguration] = []
    for key, value in reading.items():
        try:
            read[key] = value()
        except BadConfiguration as error:
            failed.append(error)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        prefix = f"cannot use the configuration {path}: "
        told = "".join(
            f"\n  {each.message.removeprefix(prefix)}"
            + (f"\n    hint: {each.hint}" if each.hint else "")
            for each in failed
        )
        raise BadConfiguration(f"{prefix}{len(failed)} mistakes{told}")
    return read


def refuse_unknown(path: Path | None, what: str, key: str, known: Collection[str]) -> None:
    """Check that a key is a known one.

    Raises:
        BadConfiguration: it is not.
    """
    if key not in known:
        # Only here: a command starts often.
        from difflib import get_close_matches

        near = get_close_matches(key, known, n=1)
        raise BadConfiguration(
            f"cannot use the configuration {path}: {what} an unknown key {key!r}",
            f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}",
        )
