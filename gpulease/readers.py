"""How the values of the settings file are written: each reader takes the text of one.

All raise `BadValue` for what they cannot read, and `BadConfiguration` for what can be no path.
"""

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
        raise BadValue(f"{text!r} is neither true nor false", None) from None


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


def read_amount(text: str) -> int:
    """Read a size, or 0 for nothing at all; bytes."""
    return 0 if text == "0" else parse_size(text)


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

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadConfiguration(
            f"cannot read the configuration {path}: there is no such file",
            "leave out --config to run with the defaults",
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfiguration(f"cannot read the configuration {path}: {error}") from error


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
        told = "".join(f"\n  {each.message.removeprefix(prefix)}" for each in failed)
        hints = dict.fromkeys(each.hint for each in failed if each.hint)
        raise BadConfiguration(f"{prefix}{len(failed)} mistakes{told}", "\n  ".join(hints) or None)
    return read


def refuse_unknown(path: Path | None, what: str, key: str, known: Collection[str]) -> None:
    """Check that a key is a known one.

    Raises:
        BadConfiguration: it is not.
    """
    if key not in known:
        raise BadConfiguration(
            f"cannot use the configuration {path}: {what} an unknown key {key!r}",
            f"known keys: {', '.join(known)}",
        )
