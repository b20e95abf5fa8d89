"""The fingerprint of a command, by which its runs are compared.

Memory depends mostly on the script, then on which options are used, then on the values of a few
options (a batch size), which cannot be told from others (a learning rate). So there are two keys:
one for runs with the same arguments, one for runs with the same option names. Keys are digests: a
command may contain secrets, and the keys outlive it.
"""

import re
from collections.abc import Iterator, Sequence
from posixpath import basename, join, normpath

from gpulease.record import record


@record(frozen=True)
class CommandFingerprint:
    """Identifies runs of the same command by digests, which do not reveal it."""

    similar_key: str
    """The same for all runs of a script with the same option names."""
    exact_key: str
    """The same for all runs with the same arguments."""


_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_TAKES_A_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of python that take the next word as their value."""
_STARTERS = frozenset({"torchrun", "accelerate", "deepspeed", "bash", "sh", "env", "nice", "time"})
"""Programs that run a script given among their arguments."""
_SCRIPT = (".py", ".sh")
_LONGEST_NAME = 128
_WORD = re.compile(r"[A-Za-z][A-Za-z_-]*")
_SNAPSHOT = re.compile(r"\A/.*/snapshots/[0-9a-f]{16}(?=/)")


def fingerprint_of(argv: Sequence[str], cwd: str) -> CommandFingerprint | None:
    """Return the keys of a command; None for one without a script or module, as `python -c`.

    A script counts with its full path, a module with its name and directory. In the similar key,
    the names of options count in any order, and words that look like subcommands (`train`, `eval`).
    """
    found = _script(argv, cwd)
    if found is None:
        return None
    script, rest = found
    names = sorted(set(_names(rest)))
    same = [script, *rest]
    return CommandFingerprint(_digest([script, *names]), _digest(same))


def script_name(argv: Sequence[str], cwd: str) -> str | None:
    """Return the name of a command's script or module for display; None if it has none."""
    found = _script(argv, cwd)
    if found is None:
        return None
    name = basename(found[0]) or found[0]
    name = found[0].partition(" in ")[0] if found[0].startswith("-m ") else name
    return "".join(char if char.isprintable() else "?" for char in name)[:_LONGEST_NAME]


def _script(argv: Sequence[str], cwd: str) -> tuple[str, Sequence[str]] | None:
    """Return the script, module or program, and the words after it."""
    if not argv:
        return None
    program = basename(argv[0])
    if _PYTHON.fullmatch(program):
        return _of_python(argv[1:], cwd)
    if program in _STARTERS:
        for place, word in enumerate(argv[1:], 1):
            if word.endswith(_SCRIPT):
                return _path(word, cwd), argv[place + 1 :]
        return None
    return (_path(argv[0], cwd) if "/" in argv[0] else argv[0]), argv[1:]


def _of_python(words: Sequence[str], cwd: str) -> tuple[str, Sequence[str]] | None:
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "-":
        if words[place] == "-m" and place + 1 < len(words):
            # In another directory, the same name is another module.
            return f"-m {words[place + 1]} in {_SNAPSHOT.sub('', cwd)}", words[place + 2 :]
        if words[place].startswith("-c"):
            return None
        place += 2 if words[place] in _TAKES_A_VALUE else 1
    if place >= len(words) or words[place] == "-":
        return None
    return _path(words[place], cwd), words[place + 1 :]


def _path(word: str, cwd: str) -> str:
    # A copy that `run --snapshot` or `--snapshot-dir` makes counts as the original.
    return _SNAPSHOT.sub("", normpath(join(cwd, word)))


def _names(words: Sequence[str]) -> Iterator[str]:
    after_option = False
    for word in words:
        if word.startswith("-") and not _is_number(word):
            yield word.partition("=")[0]
            after_option = "=" not in word
            continue
        if not after_option and _WORD.fullmatch(word):
            yield word
        after_option = False


def _is_number(word: str) -> bool:
    return word[1:2].isdigit() or word[1:2] == "."


def _digest(words: Sequence[str]) -> str:
    # Each word with its length, so that different lists never give the same text.
    text = "".join(f"{len(word)}:{word}" for word in words)
    from hashlib import sha256  # not needed where the size is given

    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
