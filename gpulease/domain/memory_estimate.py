"""How much memory a job should ask for, by what its likes used before. Pure, in bytes.

By what two runs of a script are known to be alike: a key made of the command, of no values.

Memory depends on the script most, on which of its options are used next, and on the values of a
few options (a batch size) that nobody can tell from the others (a learning rate). So there are two
keys: of runs that are the same in every word, and of runs whose options have the same names. Pure;
keys are digests, since a command may hold secrets and is forgotten before they are.

What a framework takes beside its pool, learnt from what jobs showed. Pure, in bytes.

What was observed is half the user's word: the driver says what a process holds, and the hook in it
what its pool holds. So one user's reports decide for that user alone. For others a figure counts
when three users have shown one, and it is the middle one of theirs, which no single user can carry
beyond what the others showed. And whatever was reported, the figure stays within a factor of what
gpulease would start from.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from posixpath import basename, join, normpath
from statistics import median_high

from gpulease.domain.job import CommandFingerprint
from gpulease.units import MIB, round_up_size

MARGIN = Fraction(115, 100)
"""What is asked for beyond the highest use seen: data differs, and a look a second misses peaks."""
MOST_RUNS = 10
"""The latest runs of a script that count."""
ENOUGH_RUNS = 3
"""Of fewer, the one with the largest need decides: nobody can tell which one is odd."""
_ENOUGH_MORE = Fraction(125, 100)
"""Of a lease that did not do, where the job does not say how much it lacked."""


@dataclass(frozen=True, slots=True)
class PastRun:
    """What one ended job asked for and used, on the GPU where it used most."""

    leased: int
    used: int
    out_of_memory: bool = False
    over_lease: bool = False
    """It was stopped for holding more than its lease."""

    @property
    def fell_short(self) -> bool:
        """Whether its lease was not enough for it.

        A run may also have been stopped for its use of a GPU that it did not lease.
        """
        return self.out_of_memory or (self.over_lease and self.used > self.leased)


def size_for(runs: Sequence[PastRun]) -> int | None:
    """Return what the next job like `runs`, latest first, should ask for; None without any.

    It is what the deciding run needed: its use with a margin, but never more than a lease that was
    enough for it, or else a framework that takes all it may from its start would grow from run to
    run. After a run that ran out of memory or was stopped over its lease it is no less than the
    smallest lease that was enough for another run, or else more than that one had, and no less than
    its owner was told to ask for.
    """
    found = deciding_run(runs)
    return None if found is None else round_up_size(_need(found, runs[:MOST_RUNS]))


def deciding_run(runs: Sequence[PastRun]) -> PastRun | None:
    """Return the one of `runs`, latest first, by which the next job is sized; None without any.

    Of three runs or more it is the one with the second largest need: one odd run decides nothing,
    and a need that really grew is followed when two runs have shown it. The latest run decides at
    once where its lease was not enough for it.
    """
    latest = runs[:MOST_RUNS]
    if not latest:
        return None
    by_need = sorted(latest, key=lambda run: _need(run, latest), reverse=True)
    found = by_need[1 if len(latest) >= ENOUGH_RUNS else 0]
    is_short = latest[0].fell_short and _need(latest[0], latest) > _need(found, latest)
    return latest[0] if is_short else found


def _need(run: PastRun, runs: Sequence[PastRun]) -> int:
    """Return the lease that would have been enough for `run`, as far as `runs` show it."""
    if not run.fell_short:
        return _size_after(run)
    enough = [each.leased for each in runs if not each.fell_short and each.leased > run.leased]
    need = min(enough, default=int(run.leased * _ENOUGH_MORE))
    return need if run.used <= run.leased else max(need, _size_after(run))


def _size_after(run: PastRun) -> int:
    wanted = int(run.used * MARGIN)
    return min(wanted, run.leased) if run.used <= run.leased else wanted


def retry_size(leased: int, factor: Fraction) -> int:
    """Return the lease of a new try with `factor` times as much, in whole MiB; always more."""
    return max(math.ceil(leased * factor / MIB), leased // MIB + 1) * MIB


def advised_size(peak: int) -> int:
    """Return the size to ask for next time, for a job that held `peak` bytes beyond its lease."""
    return round_up_size(int(peak * MARGIN))


def advised_size_after_oom(leased: int, peak: int | None, lacking: int | None) -> int:
    """Return the size to ask for next time, for a job that ran out of memory.

    Args:
        leased: the size of its lease.
        peak: the most that it held, where known. A job over its lease was advised by this before.
        lacking: what it could not allocate in one piece, where known; it needs more after that.
    """
    enough = max(int(leased * _ENOUGH_MORE), leased + int((lacking or 0) * MARGIN))
    return max(round_up_size(enough), advised_size(peak or 0))


_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_TAKES_A_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of python after which its next word is no script."""
_STARTERS = frozenset({"torchrun", "accelerate", "deepspeed", "bash", "sh", "env", "nice", "time"})
"""Programs that run the script that one of their words names."""
_SCRIPT = (".py", ".sh")
_LONGEST_NAME = 128
_WORD = re.compile(r"[A-Za-z][A-Za-z_-]*")
_SNAPSHOT = re.compile(r"\A/.*/snapshots/[0-9a-f]{16}(?=/)")


def fingerprint_of(argv: Sequence[str], cwd: str) -> CommandFingerprint | None:
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
    return CommandFingerprint(_digest([script, *names]), _digest(same))


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
    # The copy of a script that `run --snapshot` makes counts as the script.
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
    # Each with its length, so that no two lists of words run into one another.
    text = "".join(f"{len(word)}:{word}" for word in words)
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class OverheadKey:
    """Where a figure holds: for a framework, on GPUs of a model, under a driver, on so many."""

    framework: str
    model: str
    driver: str
    """Its version; "" where it is unknown."""
    gpus: int


LATEST = 20
"""The latest jobs of one user that count."""
ENOUGH_JOBS = 3
"""Fewer observations than this are chance."""
ENOUGH_USERS = 3
SPARE = 48 * MIB
"""Added to what was seen: the next job may load a kernel more."""
STEP = 16 * MIB
LEAST, MOST = (1, 3), (3, 1)
"""Of the start, as fractions: less would take the context for pool, more would make leases
useless."""


def learned_overhead(start: int, uid: int, seen: Mapping[int, Sequence[int]]) -> int:
    """Return how many bytes to keep free beside the pool of a framework, for jobs of `uid`.

    Args:
        start: what the table says where nothing was observed.
        uid: whose job it is.
        seen: what jobs were observed to hold beside their pools, by user, latest first.
    """
    own = _figure(seen.get(uid, ()))
    found = own if own is not None else _common(seen)
    if found is None:
        return start
    bounded = min(max(found + SPARE, start * LEAST[0] // LEAST[1]), start * MOST[0] // MOST[1])
    return -(-bounded // STEP) * STEP


def _figure(observed: Sequence[int]) -> int | None:
    """Return the highest of a user's latest jobs but one in ten, if there are enough."""
    latest = sorted(observed[:LATEST])
    if len(latest) < ENOUGH_JOBS:
        return None
    return latest[-1 - len(latest) // 10]


def _common(seen: Mapping[int, Sequence[int]]) -> int | None:
    figures = [figure for each in seen.values() if (figure := _figure(each)) is not None]
    return median_high(figures) if len(figures) >= ENOUGH_USERS else None
