"""Which jobs of Slurm a command line names.

Numbers are those of Slurm: 17, or 17_3 for an element of an array. All else (a name, `last`,
--name, --all) is looked up among the caller's own jobs that use GPUs.
"""

from collections.abc import Container, Mapping, Sequence
from fnmatch import fnmatchcase

from gpulease.cli.job_selection import (
    FINDS_ENDED,
    LAST,
    READS,
    Selection,
    ambiguous,
    announce,
    doing,
    no_last,
    no_match,
    range_of,
    say_one_of,
)
from gpulease.drawing.words import clean
from gpulease.errors import NoSuchJob, SlurmFailed
from gpulease.slurm.command.jobs import jobs_of, label_of, read_queue, state_of, uses_gpus
from gpulease.slurm.records import is_number

Row = Mapping[str, str]
_LISTED = 10
_FORGOTTEN = (
    "gpulease list lists jobs; Slurm forgets ended ones after MinJobAge, sacct may have them"
)


def select(wanted: Selection, user: str | None = None) -> dict[str, list[Row]]:
    """Return the entries of Slurm's queue for each job that the line means.

    --name and --all mean jobs of `user`, or of the caller. The keys are what Slurm's commands take:
    17, 17_3, or the number of a whole array. Jobs that were not named one by one are listed on
    stderr.

    Raises:
        NoSuchJob: Slurm knows no such job.
        BadUsage: a name matches several jobs, and the verb changes them.
    """
    if wanted.words:
        found = {}
        for word in wanted.words:
            found.update(_numbered(wanted, word) if is_number(word) else _named(wanted, word))
        return found
    return _matching(wanted, user)


def _numbered(wanted: Selection, word: str) -> dict[str, list[Row]]:
    try:
        rows = read_queue(jobs=[word])
    except SlurmFailed as error:
        if "nvalid job id" not in error.message:
            raise
        rows = []
    if not rows:
        raise NoSuchJob(f"cannot {doing(wanted.verb)} {word}: Slurm knows no such job", _FORGOTTEN)
    return {word: rows}


def _named(wanted: Selection, word: str) -> dict[str, list[Row]]:
    verb = wanted.verb
    own = by_array(jobs_of(ended=verb in FINDS_ENDED or word == LAST))
    if word == LAST:
        if not own:
            raise no_last(verb)
        return dict([list(own.items())[-1]])
    if verb != "attach" and (numbers := range_of(word)) is not None:
        between = in_range(own, numbers)
        if not between:
            raise no_match(Selection(verb, (word,)))
        announce(verb, named(between), len(between))
        return between
    found = {key: rows for key, rows in own.items() if rows[0].get("name") == word}
    if not found:
        raise no_match(wanted if len(wanted.words) == 1 else Selection(verb, (word,)))
    if len(found) > 1 and verb not in FINDS_ENDED:
        raise ambiguous(verb, word, named(found))
    key = _newest(found, verb)
    say_one_of(len(found), f"have the name {clean(word)!r}", f"job {key}")
    return {key: found[key]}


def _newest(found: Mapping[str, Sequence[Row]], verb: str) -> str:
    live = [key for key, rows in found.items() if any(state_of(row) != "ended" for row in rows)]
    return (live or list(found))[-1] if verb == "attach" else list(found)[-1]


def _matching(wanted: Selection, user: str | None) -> dict[str, list[Row]]:
    verb, pattern = wanted.verb, wanted.pattern
    own = by_array(jobs_of(user, ended=pattern is not None and verb in READS))
    if pattern is not None:
        own = {
            key: rows for key, rows in own.items() if fnmatchcase(rows[0].get("name", ""), pattern)
        }
        if not own:
            raise no_match(wanted, user or "yours")
        if verb == "attach":
            key = _newest(own, verb)
            own = {key: own[key]}
    announce(verb, named(own), len(own), user)
    return own


def named(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the ids and the names of jobs."""
    return [f"{key} ({clean(rows[0].get('name', ''))})" for key, rows in found.items()]


def by_array(jobs: Sequence[Row]) -> dict[str, list[Row]]:
    """Return jobs by number, those of an array by that of the array."""
    found: dict[str, list[Row]] = {}
    for job in jobs:
        key = job.get("arrayjobid", job["jobid"]) if "arraytaskid" in job else job["jobid"]
        found.setdefault(key, []).append(job)
    return found


def in_range(jobs: Mapping[str, list[Row]], numbers: tuple[int, int]) -> dict[str, list[Row]]:
    """Return the jobs and arrays with numbers from the first to the second."""
    return {key: rows for key, rows in jobs.items() if numbers[0] <= int(key) <= numbers[1]}


def candidates(states: Container[str], user: str | None, deadline: float) -> dict[str, str]:
    """Return the ids of jobs in some states, described: what completes a word within `deadline`."""
    rows = read_queue(ended="ended" in states, user=user, deadline=deadline)
    return {
        key: clean(f"{each[0].get('name')}, {state_of(each[0])}, {each[0].get('username')}")
        for key, each in by_array(list(filter(uses_gpus, rows))).items()
        if any(state_of(row) in states for row in each)
    }


def is_of(word: str, row: Row) -> bool:
    """Return whether an entry is of the job, the element or the array with this number."""
    array = row.get("arrayjobid")
    return word in (row["jobid"], array, f"{array}_{row.get('arraytaskid')}")


def is_array(word: str, rows: Sequence[Row]) -> bool:
    """Return whether a number means an array, not one job."""
    return (
        "_" not in word
        and any("arraytaskid" in row for row in rows)
        and word in {row.get("arrayjobid") for row in rows}
    )


def labels(rows: Sequence[Row]) -> str:
    """Return the ids of entries as people see them."""
    return ", ".join(label_of(row) for row in rows[:_LISTED])
