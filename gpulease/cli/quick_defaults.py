"""The user's defaults for `run`, where they are plain; `run_defaults` reads them otherwise.

Both have the same effect. What is not plain (quotes within quotes, lists, a mistake) is left to
typer with the whole line, before anything has happened.
"""

from __future__ import annotations

import os

from gpulease.cli.quick_parser import NotUnderstood, options_of, read
from gpulease.locations import personal_config
from gpulease.options import OPTIONS
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

VARIABLE = "GPULEASE_RUN_OPTIONS"
LEASED = "GPULEASE_JOB"
RUN_TABLE = "run"
NOTIFY_TABLE = "notify"
EXCLUSIVE = {"wait": "no_wait", "no_wait": "wait"}
"""Options that exclude each other: the typed one replaces a default for the other."""
WITHOUT_DEFAULT = frozenset({"help", "no_defaults", "socket"})
"""Parameters that have no default. A socket is trusted, so only the command line may name it."""
TYPED_ONLY = frozenset(name for name, each in OPTIONS.items() if each.is_typed_only)
_QUOTES = frozenset("'\"\\#")


@record(frozen=True)
class Default:
    """A value for an option."""

    value: Any
    """As the parser of the command line returns it."""
    option: str
    """Such as "--mem"."""
    source: str

    def __str__(self) -> str:
        """Return the option as it is typed."""
        from shlex import quote

        if isinstance(self.value, bool):
            return self.option if self.value else f"--no-{self.option.removeprefix('--')}"
        values = self.value if isinstance(self.value, list) else [self.value]
        return " ".join(f"{self.option} {quote(str(each))}" for each in values)


def quick_defaults(typed: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Default]:
    """Return the defaults that apply to a line, by parameter.

    Raises:
        NotUnderstood: `run_defaults` has to read them.
    """
    within = environment.get(LEASED) and not typed.get("new_lease")
    if typed.get("no_defaults") or within:
        return {}
    found = dict(_from_file(environment)) | dict(_from_variable(environment))
    replaced = {EXCLUSIVE[name] for name in typed if name in EXCLUSIVE}
    return {name: each for name, each in found.items() if name not in replaced}


def _from_variable(environment: Mapping[str, str]) -> Iterator[tuple[str, Default]]:
    text = environment.get(VARIABLE, "")
    if not _QUOTES.isdisjoint(text):
        raise NotUnderstood(VARIABLE)
    values = _allowed(text.split())
    for name, value in values.items():
        yield name, Default(value, OPTIONS[name].long, VARIABLE)


def _allowed(words: list[str]) -> dict[str, Any]:
    values = read("run", words)
    if not values.keys().isdisjoint({"command", *WITHOUT_DEFAULT, *TYPED_ONLY}):
        raise NotUnderstood("these have no defaults")
    return values


def _from_file(environment: Mapping[str, str]) -> Iterator[tuple[str, Default]]:
    try:
        path = personal_config(environment)
        if path is None:
            return
        if not os.path.isfile(path):  # a FIFO would never end
            raise NotUnderstood(path)
        with open(path, encoding="utf-8") as file:
            # What stands in [run] replaces the events of [notify].
            entries = sorted(_entries(file.read()))
    except (OSError, UnicodeDecodeError):
        raise NotUnderstood("the file") from None
    options = options_of("run") if entries else {}
    for table, key, value in entries:
        option = f"--{key.replace('_', '-')}"
        name, kind = options.get(option, ("help", True))
        if (kind is True) != isinstance(value, bool) or kind is False:
            raise NotUnderstood(option)
        values = value if isinstance(value, list) else [value]
        words = [word for each in values for word in (option, each) if not isinstance(word, bool)]
        read_value = _allowed(words)[name]
        found = value if kind is True else read_value
        yield name, Default(found, option, f"[{table}] in {path}")


def _entries(text: str) -> Iterator[tuple[str, str, bool | str | list[str]]]:
    """Yield the defaults in a plain TOML file, with their tables: [run], and events of [notify]."""
    table, seen = "", set[tuple[str, str]]()
    value: bool | str | list[str]
    for line in text.splitlines():
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        if words.startswith("["):
            table, key, value = words.removeprefix("[").removesuffix("]"), "", ""
        else:
            key, value = _entry(words, table)
        is_plain = not table or table.replace(".", "_").isidentifier()
        if not is_plain or table.startswith(f"{RUN_TABLE}.") or (table, key) in seen:
            raise NotUnderstood(line)
        seen.add((table, key))
        if table == RUN_TABLE and key:
            yield table, key, value
        elif (table, key) == (NOTIFY_TABLE, "events"):
            yield table, "notify", value


def _entry(line: str, table: str) -> tuple[str, bool | str | list[str]]:
    key, _, value = (part.strip() for part in line.partition("="))
    is_table = key == RUN_TABLE or (key == NOTIFY_TABLE and not table)
    if not key.replace("-", "_").isidentifier() or is_table:
        raise NotUnderstood(line)
    if table == NOTIFY_TABLE:
        return key, _texts(value) if key == "events" else _unread(value)
    if value in ("true", "false"):
        return key, value == "true"
    if value.isascii() and value.isdecimal() and (value == "0" or not value.startswith("0")):
        return key, value
    text = value[1:-1]
    is_text = len(value) > 1 and value[0] == value[-1] == '"' and text.isprintable()
    if not is_text or not _QUOTES.isdisjoint(text):
        raise NotUnderstood(line)
    return key, text


def _texts(value: str) -> list[str]:
    """Read "end", or a list such as ["end", "oom"]."""
    is_list = value.startswith("[") and value.endswith("]")
    between = (value[1:-1] if is_list else value).split('"')
    texts, rest = between[1::2], "".join(between[::2]).replace(" ", "")
    is_plain = all(text.isprintable() and _QUOTES.isdisjoint(text) for text in texts)
    if not (texts and is_plain and rest == "," * (len(texts) - 1)):
        raise NotUnderstood(value)
    return texts


def _unread(value: str) -> str:
    """Check that a value, which may have any characters, ends on its line."""
    if value.startswith(('"""', "'''")) or value.startswith("[") is not value.endswith("]"):
        raise NotUnderstood(value)
    return value
