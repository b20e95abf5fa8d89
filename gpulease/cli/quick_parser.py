"""Everyday command lines, read without typer, which takes ten times as long as all else.

What is not understood at once (help, an unknown or incomplete option, a value that may be wrong) is
left to typer, which then does all of it, or says what is wrong.
"""

from __future__ import annotations

from gpulease.cli.verbs import VERBS, arguments_of_verb, options_of_verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from gpulease.options import Option

_MOST_DIGITS = 9


class NotUnderstood(Exception):
    """The line is left to typer; a default of the user is refused for this reason."""


def parse(line: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """Return the verb, and the values of the parameters that were typed.

    None: typer has to read the line.
    """
    before: dict[str, Any] = {}
    if len(line) > 2 and line[0] == "--socket":
        before, line = {"socket": line[1]}, line[2:]
    if not line or line[0] not in VERBS or not VERBS[line[0]].quick:
        return None
    try:
        return line[0], before | read(line[0], line[1:])
    except NotUnderstood:
        return None


def with_defaults(verb: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all parameters of a verb."""
    options = options_of_verb(verb)
    found = {name: None if each.is_list else each.default for name, each in options.items()}
    words = dict.fromkeys(each.name for each in arguments_of_verb(verb))
    return {**words, **found, "socket": None, **typed}


def options_of(verb: str) -> dict[str, tuple[str, Any]]:
    """Return the parameter of each option; the value of a flag, or how a value is read."""
    found: dict[str, tuple[str, Any]] = {}
    for name, option in options_of_verb(verb).items():
        for flag in option.flags:
            if option.is_flag:
                yes, _, no = flag.partition("/")
                # With --no-NAME, `run` switches off a default of the user.
                no = no or (f"--no-{option.long[2:]}" if verb == "run" else flag)
                found |= {no: (name, False), yes: (name, True)}
            else:
                found[flag] = name, _kind(option)
    return {**found, "--socket": ("socket", "text")}


def _kind(option: Option) -> str | tuple[str, ...]:
    if option.is_list:
        return "list"
    is_number = option.annotation.startswith("int")
    return option.choices or ("number" if is_number else "text")


def read(verb: str, line: Sequence[str]) -> dict[str, Any]:
    """Return the values of the parameters that were typed.

    Raises:
        NotUnderstood: typer has to read the line.
    """
    options = options_of(verb)
    values: dict[str, Any] = {}
    words: list[str] = []
    left = iter(line)
    for word in left:
        if word == "--":
            words += left
        elif word.startswith("-") and word != "-":
            _read_option(options, word, left, values)
        else:
            words.append(word)
            if verb == "run":
                words += left
    return {**values, **_read_words(verb, words)}


def _read_words(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the values of the arguments: of one list, or of one word."""
    found = arguments_of_verb(verb)
    if len(found) > 1 or (words and not found):
        raise NotUnderstood("it takes no such words")
    if not words:
        if found and found[0].is_required:
            raise NotUnderstood(f"argument {found[0].metavar!r} is missing")
        return {}
    (argument,) = found
    if argument.is_list:
        return {argument.name: words}
    if len(words) > 1 or (argument.choices and words[0] not in argument.choices):
        raise NotUnderstood(f"{words[-1]!r} cannot be used")
    return {argument.name: words[0]}


def _read_option(
    options: Mapping[str, tuple[str, Any]], word: str, left: Iterator[str], values: dict[str, Any]
) -> None:
    option, equals, value = word.partition("=")
    if option not in options:
        raise NotUnderstood(f"no such option: {option}")
    name, kind = options[option]
    if equals and (isinstance(kind, bool) or not option.startswith("--")):
        raise NotUnderstood(f"option {option!r} does not take a value")
    if isinstance(kind, bool):
        values[name] = kind
        return
    text = value if equals else next(left, "-")
    if text.startswith("-") and not (kind == "number" and text[1:].isdecimal()):
        raise NotUnderstood(f"option {option!r} requires an argument")
    read = _value(kind, text)
    values[name] = [*values.get(name, ()), read] if kind == "list" else read


def read_value(option: Option, text: str) -> str | int:
    """Return a value of an option of `run`, of those of a list one.

    Raises:
        NotUnderstood: it is none of its values.
    """
    return _value(_kind(option), text)


def _value(kind: str | tuple[str, ...], text: str) -> str | int:
    if isinstance(kind, tuple) and text not in kind:
        raise NotUnderstood(f"{text!r} is not one of {', '.join(kind)}")
    if kind != "number":
        return text
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS):
        raise NotUnderstood(f"{text!r} is not a whole number")
    return int(text)
