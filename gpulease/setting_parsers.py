"""Parsers of the values in the settings file, and the report of its mistakes.

Each parser takes the text of one value, and raises `BadValue` if it cannot be used.
"""

import re
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from gpulease.errors import BadConfiguration, BadValue, GpuleaseError
from gpulease.units import Share, format_size, parse_memory, parse_setting_span, parse_size

T = TypeVar("T")

LONGEST_GRACE = timedelta(days=1)
_LARGEST_COUNT = 1_000_000
_LARGEST_FACTOR = 1000
_LARGEST_FILE = 4 << 20
_SHOWN_LENGTH = 40


def parse_switch(text: str) -> bool:
    """Parse `true` or `false`."""
    return _one_of({"true": True, "false": False}, text.lower())


def parse_auto(text: str) -> bool:
    """Parse `auto` (where possible) or `off`."""
    return _one_of({"auto": True, "off": False}, text.lower())


def one_of(*words: str) -> Callable[[str], str]:
    """Return a parser of one of these words."""
    return lambda text: _one_of({word: word for word in words}, text)


def _one_of(meanings: Mapping[str, T], text: str) -> T:
    if text not in meanings:
        words = [word if word in ("true", "false") else f'"{word}"' for word in meanings]
        valid = f"{', '.join(words[:-1])} or {words[-1]}"
        raise BadValue(f"{text[:_SHOWN_LENGTH]!r} is not a valid value", f"use {valid}")
    return meanings[text]


def parse_count(text: str) -> int:
    """Parse a number from 1 on."""
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) <= _LARGEST_COUNT:
        raise BadValue(
            f"{text[:_SHOWN_LENGTH]!r} is not a number from 1 to {_LARGEST_COUNT}",
            "write it in digits, without a unit",
        )
    return int(text)


def parse_factor(text: str) -> float:
    """Parse a number above 0 and up to 1000, such as 1.2."""
    found = re.fullmatch(r"\d{1,4}(\.\d{1,6})?", text, re.ASCII)
    if found is None or not 0 < float(text) <= _LARGEST_FACTOR:
        raise BadValue(
            f"{text[:_SHOWN_LENGTH]!r} is not a number above 0 and up to {_LARGEST_FACTOR}",
            "for example 1.2",
        )
    return float(text)


def limit_of(parser: Callable[[str], T]) -> Callable[[str], T | None]:
    """Return a parser of what `parser` takes, or of "none" for no limit."""
    return lambda text: None if text == "none" else parser(text)


def parse_grace(text: str) -> timedelta:
    """Parse a span of at most a day."""
    span = parse_setting_span(text)
    if span > LONGEST_GRACE:
        raise BadValue(f"cannot use the grace {text}: it is over a day", "for example 5m, 1h or 1d")
    return span


def parse_amount(text: str) -> int:
    """Parse a size in bytes, or 0."""
    return 0 if text == "0" else parse_size(text)


def parse_reserve(text: str) -> int | Share:
    """Parse a size in bytes, a share of the whole, or 0."""
    return 0 if text == "0" else parse_memory(text)


def parse_path(text: str) -> Path:
    """Parse a path."""
    if not text or "\0" in text:
        raise BadValue(f"cannot use the path {text[:_SHOWN_LENGTH]!r}: no file can have this name")
    return Path(text)


def parse_names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas, such as "0,3"."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


def parse_address(text: str) -> str:
    """Parse the address of a web site, without a slash at its end.

    Raises:
        BadValue: it is none.
    """
    from urllib.parse import urlsplit  # commands import this file, and have no use for it

    try:
        found = urlsplit(text)
        is_page = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        is_page = False
    if not is_page or found.query or found.fragment or not text.isprintable() or " " in text:
        raise BadValue(
            f"{text[:_SHOWN_LENGTH]!r} is no address of a page",
            "https://gpu01.example.org/gpulease",
        )
    return text.rstrip("/")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a settings file.

    Raises:
        BadConfiguration: it cannot be read.
    """
    # Only the daemon reads a file; commands start faster without this import.
    import tomllib

    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:
            raise BadConfiguration(
                f"cannot read the configuration {path}: it has {format_size(size)}, and the limit "
                f"is {format_size(_LARGEST_FILE)}",
                "use [groups.NAME] tables instead of one table for each user",
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadConfiguration(
            f"cannot read the configuration {path}: no such file",
            "leave out --config to run with the defaults",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        # Numbers of thousands of digits and deeply nested tables raise errors of other kinds.
        raise BadConfiguration(f"cannot read the configuration {path}: {error}") from error


class Mistakes:
    """Collects the mistakes in a settings file, and reports them together.

    Only the first ones are worked out and shown: a file may have hundreds of thousands.
    """

    MOST_SHOWN = 20

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._shown: list[tuple[str, str | None]] = []
        self._count = 0

    def parse(self, where: str, value: object, parser: Callable[[str], Any]) -> Any:
        """Return the parsed value of the key `where`; after a mistake, None."""
        if parser is parse_names and isinstance(value, list):
            value = ",".join(map(str, value))
        if not isinstance(value, str | int | float):
            self._add(f'write {where} = "..."', None)
            return None
        try:
            return parser(str(value))
        except ValueError:
            self._add(f"{where}: the number is too large", None)  # of thousands of digits
        except GpuleaseError as error:
            self._add(f"{where}: {error.message}", error.hint)
        return None

    def unknown(self, what: str, key: str, known: Collection[str]) -> None:
        """Add an unknown key, with a suggestion."""
        if self._count >= self.MOST_SHOWN:
            self._count += 1
            return
        # Commands start faster without this import.
        from difflib import get_close_matches

        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        self._add(f"{what} an unknown key {key!r}", hint)

    def not_a_table(self, table: str, hint: str) -> None:
        """Add something else in the place of a table."""
        self._add(f"{table} is a table", hint)

    def misplaced(self, table: str, hint: str) -> None:
        """Add a table that belongs in another file."""
        self._add(f"[{table}] is not for the daemon of a machine", hint)

    def raise_if_any(self) -> None:
        """Report all mistakes, each with its hint.

        Raises:
            BadConfiguration: there are some.
        """
        if not self._count:
            return
        prefix = f"cannot use the configuration {self._path}: "
        if self._count == 1:
            raise BadConfiguration(prefix + self._shown[0][0], self._shown[0][1])
        lines = [f"{self._count} mistakes"]
        for what, hint in self._shown:
            lines += [f"  {what}", *([f"    hint: {hint}"] if hint else [])]
        if self._count > len(self._shown):
            lines.append(f"  and {self._count - len(self._shown)} more")
        raise BadConfiguration(prefix + "\n".join(lines))

    def _add(self, what: str, hint: str | None) -> None:
        self._count += 1
        if len(self._shown) < self.MOST_SHOWN:
            self._shown.append((what, hint))


def read_keys(path: Path, parsers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Return those keys of a settings file that it has; one of a table is named as "slurm.shard".

    Raises:
        BadConfiguration: the file, or one of the keys, cannot be read.
    """
    content, mistakes, found = read_toml(path), Mistakes(path), dict[str, Any]()
    for key, parser in parsers.items():
        table, _, name = key.rpartition(".")
        values = content.get(table) if table else content
        if isinstance(values, dict) and name in values:
            found[key] = mistakes.parse(key, values[name], parser)
    mistakes.raise_if_any()
    return found
