"""Which jobs a command line names: 17, 3-7, a name, `last`, --name 'sweep*' or --all.

Numbers are taken as they are, and may be another user's. All else is looked up in one list of the
caller's own jobs, also for root.
"""

from __future__ import annotations

from gpulease.cli.render import own_name, print_error, print_stderr, print_stdout
from gpulease.cluster_choice import may_be_a_node
from gpulease.drawing.words import clean, id_of
from gpulease.errors import BadUsage, GpuleaseError, NoDaemon, NoSuchJob, WrongState
from gpulease.record import record
from gpulease.units import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Literal, TypeVar

    from gpulease.client.light_client import LightClient
    from gpulease.wire.jobs import JobView

    T = TypeVar("T")

    Verb = Literal[
        "show",
        "logs",
        "attach",
        "plot",
        "wait",
        "edit",
        "move",
        "move before",
        "cancel",
        "again",
        "requeue",
        "extend",
        "keep",
    ]

LAST = "last"
"""The word for what the caller submitted last."""
_LAST_UNLESS_NAMED = frozenset({"show", "logs", "attach"})
"""The verbs that mean `last` where no job is named: they change nothing."""
_TAKES_ONE = frozenset({"attach", "plot", "move before", "again"})
READS = frozenset({"show", "logs", "attach", "plot", "again"})
"""The verbs that change nothing: of several jobs with one name they take the newest."""
_ONE_BY_ONE = READS | {"cancel"}
"""The verbs for which the number of an array is not replaced by those of its elements."""
FINDS_ENDED = READS | {"wait"}
"""The verbs that find ended jobs by name; wait --name finds only those that wait or run."""
_BY_WORDS = {"edit": "--mem 6G", "move": "--first", "again": "--mem 8G"}
"""The verbs without --name PATTERN and --all, each with options for an example."""
_LONGEST_WORD = 80
"""Of a name in an error."""
_LISTED = 10
"""Jobs that a message names; the others are counted."""
MOST_ONE_BY_ONE = 20
"""Jobs for which the result of a cancellation is printed one by one."""
_APPLIES: dict[str, Callable[[JobView], bool]] = {
    "extend": lambda job: job.state != "releasing" and job.claim.time_limit is not None,
    "keep": lambda job: job.state in ("granted", "active"),
    "requeue": lambda job: job.kind == "run" and job.state in ("granted", "active"),
    "logs": lambda job: job.kind == "run",
    "edit": lambda job: job.state == "queued",
    "move": lambda job: job.state == "queued",
}
"""What --all, --name, a range and an array leave out, by verb: these jobs would be refused."""
_APPLIES_TO = {
    "extend": "waits or runs with a time limit",
    "keep": "runs",
    "requeue": "runs",
    "edit": "waits",
    "move": "waits",
}
"""What errors say of the jobs to which a verb applies, unless it is all that wait or run."""


@record(frozen=True)
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
    words = [part for word in words or () for part in _listed_in(word)]
    if not words and pattern is None and not every and verb in _LAST_UNLESS_NAMED:
        words = [LAST]
    ways = sum((bool(words), pattern is not None, every))
    if ways == 0:
        raise BadUsage(f"no job to {doing(verb)}", _example(verb))
    if ways > 1:
        raise BadUsage(
            f"cannot {doing(verb)} jobs: JOB, --name and --all exclude each other", _example(verb)
        )
    return Selection(verb, words, pattern, every)


def _listed_in(word: str) -> list[str]:
    """Return the numbers and ranges in 3,5-7; any other word may be a name."""
    parts = word.split(",")
    are_numbers = all(_is_number(part) or range_of(part) is not None for part in parts)
    return parts if are_numbers else [word]


def range_of(word: str) -> tuple[int, int] | None:
    """Return the first and the last number in 3-7; None for another word."""
    first, dash, last = word.partition("-")
    return (int(first), int(last)) if dash and _is_number(first) and _is_number(last) else None


def select_jobs(client: LightClient, wanted: Selection) -> list[int]:
    """Return the numbers of the jobs, each once.

    Jobs that were not named one by one are listed on stderr before anything is done to them.

    Raises:
        NoSuchJob: no job of the caller matches.
        BadUsage: a name matches several jobs, and the verb changes them.
    """
    verb = wanted.verb
    if wanted.words:
        needs_list = not all(map(_is_number, wanted.words))
        ended = verb in FINDS_ENDED or LAST in wanted.words
        jobs = own_jobs(client, ended=ended) if needs_list else ()
        found_by_word = (_by_word(client, jobs, verb, word) for word in wanted.words)
        return list(dict.fromkeys(number for numbers in found_by_word for number in numbers))
    jobs = own_jobs(client, ended=not wanted.every and verb in READS)
    if wanted.pattern is not None:
        from fnmatch import fnmatchcase

        jobs = [job for job in jobs if fnmatchcase(job.name, wanted.pattern)]
    found = _applicable(jobs, verb)
    if not found and not wanted.every:
        raise no_match(wanted)
    if verb == "attach":
        chosen = _newest(found, verb)
        say_one_of(len(found), f"match {wanted.pattern!r}", f"job {id_of(chosen)}")
        return [chosen.id]
    announce(verb, list(map(named, found)), len(found))
    return [job.id for job in found]


def announce(verb: Verb, found: Sequence[str], count: int, user: str | None = None) -> None:
    """Say which jobs were found; `found` names them, or the first of `count`."""
    if not count:
        # A script that ends all its jobs has done so if there are none.
        owner = f"{user} has" if user else "you have"
        print_stderr(f"gpulease: {owner} no jobs to {doing(verb)}")
    else:
        print_stderr(f"gpulease: {counted(count, 'job')}: {_listed(found, count)}")


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


def doing(verb: Verb) -> str:
    """Return what a verb does, as it reads after "cannot"."""
    other = {
        "logs": "print the output of", "attach": "attach to", "wait": "wait for",
        "again": "repeat",
    }  # fmt: skip
    return other.get(verb, verb)


def _example(verb: Verb) -> str:
    if verb in _BY_WORDS:
        return f"gpulease {verb} 17 {_BY_WORDS[verb]}; name the job by number or name"
    more = "" if verb == "attach" else ", or --all for all your jobs"
    end = " +2h" if verb == "extend" else ""
    return f"gpulease {verb} 17{end}; name the job by number or name, by --name 'sweep*'{more}"


def _is_number(word: str) -> bool:
    # Python refuses to read numbers of over 4,300 digits.
    return word.isascii() and word.isdigit() and len(word) <= 18


def own_jobs(client: LightClient, *, ended: bool) -> Sequence[JobView]:
    """Return the jobs of the caller in the order in which the caller submitted them.

    A job that was queued or tried again follows the job that it continues: its number is newer than
    those of jobs that were submitted after that one.
    """
    jobs = client.jobs(everything=ended, user=own_name()).jobs
    submitted = dict[int, int]()
    for job in jobs:
        before = job.retry_of
        submitted[job.id] = job.id if before is None else submitted.get(before, before)
    return sorted(jobs, key=lambda job: (submitted[job.id], job.id))


def _number_here(client: LightClient, verb: Verb, number: int) -> int:
    """Return what the daemon calls a job by: people call those of Slurm by Slurm's numbers.

    Raises:
        BadUsage: two jobs have the number.
        NoSuchJob: none has it.
    """
    if not may_be_a_node():
        return number
    jobs = client.jobs(everything=verb in FINDS_ENDED).jobs
    found = [job for job in jobs if number in (job.slurm_job, job.id)]
    called = [job for job in found if job.slurm_job in (number, None)]
    if len({job.slurm_job for job in called}) > 1:
        raise BadUsage(
            f"cannot {doing(verb)} {number}: Slurm and the queue of this machine both have such "
            "a job",
            f"gpulease {verb} NAME, or without GPULEASE_CLUSTER and --socket for the job of Slurm",
        )
    if found and not called:
        raise NoSuchJob(
            f"cannot {doing(verb)} {number}: no such job",
            "gpulease list --all lists all jobs",
        )
    return called[-1].id if called else number


def _by_word(client: LightClient, jobs: Sequence[JobView], verb: Verb, word: str) -> list[int]:
    if _is_number(word):
        return _with_array(client, verb, _number_here(client, verb, int(word)))
    if verb not in _TAKES_ONE and (numbers := range_of(word)) is not None:
        return _in_range(jobs, verb, numbers)
    first, underscore, index = word.partition("_")
    if underscore and _is_number(first) and _is_number(index) and len(index) <= 6:
        return [_element(client, verb, int(first), int(index))]
    if word == LAST:
        if not jobs:
            raise no_last(verb)
        return _with_rest(jobs, verb, jobs[-1])
    return _by_name(jobs, verb, word)


def _by_name(jobs: Sequence[JobView], verb: Verb, word: str) -> list[int]:
    own = [job for job in jobs if job.name == word]
    live = [job for job in own if job.state != "ended"]
    if verb in FINDS_ENDED and own:
        chosen = _newest(own, verb)
        array = array_of(chosen)
        this = f"job {id_of(chosen)}" if array is None else f"array {array}"
        say_one_of(_count_arrays_once(own), f"have the name {clean(word)!r}", this)
        return _with_rest(jobs, verb, chosen)
    if _count_arrays_once(live) > 1:
        raise ambiguous(verb, word, list(map(named, live)))
    if not own:
        raise no_match(Selection(verb, (word,)))
    # That an ended job cannot be changed is the daemon's to say.
    return _with_rest(jobs, verb, (live or own)[-1])


def _in_range(jobs: Sequence[JobView], verb: Verb, numbers: tuple[int, int]) -> list[int]:
    """Return the jobs of the caller in a range, in which those of other users lie as well."""
    first, last = numbers
    between = [job for job in jobs if first <= (job.slurm_job or job.id) <= last]
    found = sorted(_applicable(between, verb), key=lambda job: job.id)
    if verb not in FINDS_ENDED:
        found = [job for job in found if job.state != "ended"]
    if not found:
        raise no_match(Selection(verb, (f"{first}-{last}",)))
    announce(verb, list(map(named, found)), len(found))
    return [job.id for job in found]


# Arrays.


def array_of(job: JobView) -> int | None:
    """Return the id of the array of a job; None if it is in none."""
    return None if job.queue is None else job.queue.array


def names_array(words: Sequence[str], job: JobView) -> bool:
    """Return whether one of `words` means the array of which `job` is the first element."""
    if array_of(job) != job.id:
        return False
    by_name = id_of(job) not in words and not {LAST, job.name}.isdisjoint(words)
    return by_name or str(job.id) in words


def one_element(verb: Verb, job: JobView) -> BadUsage:
    """Return the error for an array where only one job is possible."""
    return BadUsage(
        f"cannot {doing(verb)} array {job.id}: name one of its elements",
        f"gpulease {verb} {id_of(job)}; gpulease show {job.id} lists them",
    )


def _element(client: LightClient, verb: Verb, array: int, index: int) -> int:
    """Return the id of an element; of its attempts the latest."""
    found = [job for job in client.elements(array, index) if array_of(job) == array]
    if not found:
        raise NoSuchJob(
            f"cannot {doing(verb)} {array}_{index}: no such element of an array",
            f"gpulease show {array} shows what {array} is",
        )
    return found[-1].id


def _with_array(client: LightClient, verb: Verb, number: int) -> list[int]:
    """Return a number, or for a verb that changes jobs those elements of an array that it changes.

    `cancel` asks the daemon to choose them.
    """
    if verb in _ONE_BY_ONE:
        return [number]
    live = verb not in FINDS_ENDED
    elements = client.elements(number, everything=not live)
    return _all_of([job for job in elements if array_of(job) == number], verb) or [number]


def _with_rest(jobs: Sequence[JobView], verb: Verb, job: JobView) -> list[int]:
    """Return a job that is in no array; of an array what its number means to the verb."""
    array = array_of(job)
    if array is None:
        return [job.id]
    elements = [each for each in jobs if array_of(each) == array]
    if verb in READS:
        # The first element may have been purged.
        return [array] if array in {each.id for each in elements} else [job.id]
    rest = [each for each in elements if verb in FINDS_ENDED or each.state != "ended"]
    return _all_of(rest, verb) or [job.id]


def _all_of(elements: Sequence[JobView], verb: Verb) -> list[int]:
    """Return the elements of an array to which a verb applies.

    Raises:
        WrongState: it applies to none of them.
    """
    found = _applicable(elements, verb)
    if elements and not found:
        array = array_of(elements[0])
        raise WrongState(
            f"cannot {doing(verb)} array {array}: none of its elements {_which(verb)}",
            f"gpulease show {array} lists them",
        )
    return [job.id for job in found]


def _which(verb: Verb) -> str:
    return _APPLIES_TO.get(verb, "waits or runs")


def _applicable(jobs: Sequence[JobView], verb: Verb) -> list[JobView]:
    applies = _APPLIES.get(verb)
    return [job for job in jobs if applies is None or applies(job)]


def _newest(found: Sequence[JobView], verb: Verb) -> JobView:
    """Return the newest job, for attach the newest live one."""
    live = [job for job in found if job.state != "ended"]
    return (live or found)[-1] if verb == "attach" else found[-1]


def _count_arrays_once(jobs: Iterable[JobView]) -> int:
    return len({array_of(job) or job.id for job in jobs})


def say_one_of(count: int, what_they_do: str, this: str) -> None:
    """Say which of several jobs is meant."""
    if count > 1:
        print_stderr(f"gpulease: {count} of your jobs {what_they_do}; this is {this}")


def named(job: JobView) -> str:
    """Return the id and the name of a job."""
    return f"{id_of(job)} ({clean(job.name)})"


def _listed(found: Sequence[str], count: int) -> str:
    parts = found[:_LISTED]
    more = count - len(parts)
    return ", ".join([*parts, f"and {more} more"] if more else parts)


def ambiguous(verb: Verb, word: str, found: Sequence[str]) -> BadUsage:
    """Return the error for a name that several jobs have, which `found` names."""
    from glob import escape
    from shlex import quote

    return BadUsage(
        f"cannot {doing(verb)} {clean(word)!r}: {len(found)} of your jobs have this name: "
        f"{_listed(found, len(found))}",
        f"give the number of one, or --name {quote(escape(word))} for all of them",
    )


def no_last(verb: Verb) -> NoSuchJob:
    """Return the error for `last` where the caller has no job."""
    return NoSuchJob(f"cannot {doing(verb)} the last job: you have none", "gpulease run starts one")


def no_match(wanted: Selection, owner: str = "yours") -> NoSuchJob:
    """Return the error for a name or a pattern that no job of `owner` has."""
    verb, words = wanted.verb, [each[:_LONGEST_WORD] for each in wanted.words]
    hint = "gpulease list shows the jobs that wait or run, gpulease list --all ended ones as well"
    yours = f"job of {owner}" if verb in READS else f"job of {owner} that {_which(verb)}"
    if wanted.pattern is not None:
        return NoSuchJob(f"cannot {doing(verb)} {wanted.pattern!r}: no {yours} matches it", hint)
    if (ends := range_of(words[0])) is not None:
        first, last = ends
        swapped = f"write the lower number first: {last}-{first}" if first > last else hint
        return NoSuchJob(f"cannot {doing(verb)} {words[0]}: no {yours} is in this range", swapped)
    if any(char in words[0] for char in "*?["):
        hint = f"for the jobs whose names match a pattern: --name {words[0]!r}"
        return NoSuchJob(f"cannot {doing(verb)} {words[0]!r}: no {yours} has this name", hint)
    return NoSuchJob(
        f"cannot {doing(verb)} {words[0]!r}: no {yours} has this name",
        f"{hint}; a job of another user is named by its number",
    )
