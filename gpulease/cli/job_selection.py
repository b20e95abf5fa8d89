"""Which jobs a command line names: by number or name, `last`, --name 'sweep*' or --all.

Numbers are taken as they are, and may be another user's. All else is looked up in one list of the
caller's own jobs, also for root.
"""

import os
import pwd
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Literal, TypeVar

from gpulease.cli.format import clean
from gpulease.cli.render import print_error, print_stderr, print_stdout
from gpulease.client import Client
from gpulease.errors import BadUsage, GpuleaseError, NoDaemon, NoSuchJob
from gpulease.wire.views import JobView

T = TypeVar("T")

Verb = Literal["show", "logs", "attach", "wait", "cancel", "requeue", "extend", "keep"]
LAST = "last"
"""The word for the newest job of the caller."""
_READS = frozenset({"show", "logs", "attach"})
"""The verbs that change nothing: of several jobs with one name they take the newest."""
_FINDS_ENDED = _READS | {"wait"}
"""The verbs that find ended jobs by name; wait --name finds only those that wait or run."""
_LISTED = 10
"""Jobs that a message names; the others are counted."""
_APPLIES: dict[str, Callable[[JobView], bool]] = {
    "extend": lambda job: job.state != "releasing" and job.claim.time_limit is not None,
    "keep": lambda job: job.state in ("granted", "active"),
    "requeue": lambda job: job.kind == "run" and job.state in ("granted", "active"),
    "logs": lambda job: job.kind == "run",
}
"""What --all leaves out of the live jobs of the caller, by verb: these would only be refused."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a command line says about jobs, in exactly one way."""

    verb: Verb
    words: Sequence[str] = ()
    pattern: str | None = None
    every: bool = False


def selection(
    verb: Verb, words: Sequence[str] | None, pattern: str | None = None, every: bool = False
) -> Selection:
    """Return what a command line says about jobs.

    Raises:
        BadUsage: it names no job, or names jobs in two ways.
    """
    ways = sum((bool(words), pattern is not None, every))
    if ways == 0:
        raise BadUsage(f"no job to {_doing(verb)}", _example(verb))
    if ways > 1:
        raise BadUsage(
            f"cannot {_doing(verb)}: JOB, --name and --all exclude each other", _example(verb)
        )
    return Selection(verb, words or (), pattern, every)


def select_jobs(client: Client, wanted: Selection) -> list[int]:
    """Return the numbers of the jobs, each once.

    Jobs that were not named one by one are listed on stderr before anything is done to them.

    Raises:
        NoSuchJob: no job of the caller matches.
        BadUsage: a name matches several jobs, and the verb changes them.
    """
    verb = wanted.verb
    if wanted.words:
        needs_list = not all(map(_is_number, wanted.words))
        ended = verb in _FINDS_ENDED or LAST in wanted.words
        jobs = _own_jobs(client, ended=ended) if needs_list else ()
        return list(dict.fromkeys(_by_word(jobs, verb, word) for word in wanted.words))
    found = _matching(_own_jobs(client, ended=not wanted.every and verb in _READS), wanted)
    if verb == "attach":
        return [_newest(found, verb, f"match {wanted.pattern!r}").id]
    announce(verb, found, len(found))
    return [job.id for job in found]


def announce(verb: Verb, found: Sequence[JobView], count: int, user: str | None = None) -> None:
    """Say which jobs were found; `found` may be the first of `count`."""
    if not count:
        # A script that ends all its jobs has done so if there are none.
        owner = f"{user} has" if user else "you have"
        print_stderr(f"gpulease: {owner} no jobs to {_doing(verb)}")
    else:
        print_stderr(f"gpulease: {_count(count)}: {_listed(found, count)}")


def for_each(targets: Iterable[T], act: Callable[[T], str]) -> int:
    """Call `act` for each target and print what it returns; return the exit code.

    A failure is printed, does not stop the others, and decides the exit code.

    Raises:
        NoDaemon: nothing answers, and would not for the next one either.
    """
    status = 0
    for target in dict.fromkeys(targets):
        try:
            print_stdout(act(target))
        except NoDaemon:
            raise
        except GpuleaseError as error:
            print_error(error)
            status = error.exit_code
    return status


def _doing(verb: Verb) -> str:
    """Return what a verb does, as it reads after "cannot"."""
    other = {"logs": "print the output of", "attach": "attach to", "wait": "wait for"}
    return other.get(verb, verb)


def _example(verb: Verb) -> str:
    more = "" if verb == "attach" else ", or --all for all your jobs"
    end = " +2h" if verb == "extend" else ""
    return f"gpulease {verb} 17{end}; name the job by number or name, by --name 'sweep*'{more}"


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _own_jobs(client: Client, *, ended: bool) -> Sequence[JobView]:
    """Return the jobs of the caller, oldest first."""
    return client.jobs(everything=ended, user=own_name()).jobs


def own_name() -> str:
    """Return the caller's user name as the daemon writes it."""
    # As the daemon names the owner of a job; the environment (USER) may say something else.
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _by_word(jobs: Sequence[JobView], verb: Verb, word: str) -> int:
    if _is_number(word):
        return int(word)
    if word == LAST:
        if not jobs:
            raise NoSuchJob(
                f"cannot {_doing(verb)} the last job: you have none", "gpulease run starts one"
            )
        return jobs[-1].id
    named = [job for job in jobs if job.name == word]
    live = [job for job in named if job.state != "ended"]
    if verb in _FINDS_ENDED and named:
        return _newest(named, verb, f"have the name {clean(word)!r}").id
    if len(live) > 1:
        raise _ambiguous(verb, word, live)
    if not named:
        raise no_match(Selection(verb, (word,)))
    # That an ended job cannot be changed is the daemon's to say.
    return (live or named)[-1].id


def _matching(jobs: Sequence[JobView], wanted: Selection) -> list[JobView]:
    if wanted.pattern is not None:
        found = [job for job in jobs if fnmatchcase(job.name, wanted.pattern)]
    else:
        applies = _APPLIES.get(wanted.verb)
        found = [job for job in jobs if applies is None or applies(job)]
    if not found and not wanted.every:
        raise no_match(wanted)
    return found


def _newest(found: Sequence[JobView], verb: Verb, what_they_do: str) -> JobView:
    """Return the newest job, for attach the newest live one, and say if it was one of several."""
    live = [job for job in found if job.state != "ended"]
    chosen = (live or found)[-1] if verb == "attach" else found[-1]
    if len(found) > 1:
        print_stderr(f"gpulease: {len(found)} of your jobs {what_they_do}; this is job {chosen.id}")
    return chosen


def _count(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def _listed(found: Sequence[JobView], count: int) -> str:
    parts = [f"{job.id} ({clean(job.name)})" for job in found[:_LISTED]]
    more = count - len(parts)
    return ", ".join([*parts, f"and {more} more"] if more else parts)


def no_match(wanted: Selection, owner: str = "yours") -> NoSuchJob:
    """Return the error for a name or a pattern that no job of `owner` has."""
    verb, words = wanted.verb, wanted.words
    hint = "gpulease list shows the jobs that wait or run, gpulease list --all ended ones as well"
    yours = f"job of {owner}" if verb in _READS else f"job of {owner} that waits or runs"
    if wanted.pattern is not None:
        return NoSuchJob(f"cannot {_doing(verb)}: no {yours} matches {wanted.pattern!r}", hint)
    return NoSuchJob(
        f"cannot {_doing(verb)} {words[0]!r}: no {yours} has this name",
        f"{hint}; a job of another user is named by its number",
    )


def _ambiguous(verb: Verb, word: str, found: Sequence[JobView]) -> GpuleaseError:
    return BadUsage(
        f"cannot {_doing(verb)} {word!r}: {len(found)} of your jobs have this name: "
        f"{_listed(found, len(found))}",
        f"give the number of one, or --name {shlex.quote(escape(word))} for all of them",
    )
