"""By what two runs of a script are known to be alike: a key made of the command, of no values.

Memory depends on the script most, on which of its options are used next, and on the values of a
few options (a batch size) that nobody can tell from the others (a learning rate). So there are two
keys: of runs that are the same in every word, and of runs whose options have the same names. Pure;
keys are digests, since a command may hold secrets and is forgotten before they are.
"""

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from posixpath import basename, join, normpath

from gpulease.domain.account import Shape

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_TAKES_A_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of python after which its next word is no script."""
_STARTERS = frozenset({"torchrun", "accelerate", "deepspeed", "bash", "sh", "env", "nice", "time"})
"""Programs that run the script that one of their words names."""
_SCRIPT = (".py", ".sh")
_LONGEST_NAME = 128
_WORD = re.compile(r"[A-Za-z][A-Za-z_-]*")


def shape_of(argv: Sequence[str], cwd: str) -> Shape | None:
    """Return the keys of a command; None for one that is of no kind, such as `python -c`.

    A script counts by its whole path, a module by its name. Of what follows, the names of options
    count, in any order, and words that look like the name of a command (`train`, `eval`).
    """
    found = _script(argv, cwd)
    if found is None:
        return None
    script, rest = found
    names = sorted(set(_names(rest)))
    same = [script, *rest]
    return Shape(_digest([script, *names]), _digest(same))


def script_name(argv: Sequence[str], cwd: str) -> str | None:
    """Return what the script or the module of a command is called, to be shown."""
    found = _script(argv, cwd)
    if found is None:
        return None
    name = basename(found[0]) or found[0]
    name = found[0].partition(" in ")[0] if found[0].startswith("-m ") else name
    return "".join(char if char.isprintable() else "?" for char in name)[:_LONGEST_NAME]


def _script(argv: Sequence[str], cwd: str) -> tuple[str, Sequence[str]] | None:
    """Return what is run, and the words after it."""
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
            # The same name is another module in another folder.
            return f"-m {words[place + 1]} in {cwd}", words[place + 2 :]
        if words[place].startswith("-c"):
            return None
        place += 2 if words[place] in _TAKES_A_VALUE else 1
    if place >= len(words) or words[place] == "-":
        return None
    return _path(words[place], cwd), words[place + 1 :]


def _path(word: str, cwd: str) -> str:
    return normpath(join(cwd, word))


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
    # Each with its length, so that no two lists of words run into one another.
    text = "".join(f"{len(word)}:{word}" for word in words)
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
