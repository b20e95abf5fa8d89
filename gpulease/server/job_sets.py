"""Which jobs a request about several jobs means, and whether the caller may change them."""

from collections.abc import Callable
from fnmatch import fnmatchcase

from gpulease.domain.job import Job
from gpulease.errors import BadValue
from gpulease.server.auth import Access, Caller, Rights
from gpulease.wire.requests import LONGEST_NAME, CancelJobsRequest
from gpulease.wire.text import printable


def chosen_by(asked: CancelJobsRequest, caller: Caller, rights: Rights) -> Callable[[Job], bool]:
    """Return what tells whether a request to cancel jobs means a job.

    What it returns raises NotAllowed for a job that is meant and belongs to another user.

    Raises:
        BadValue: the pattern is too long.
        NotAllowed: the request is about another user.
    """
    if asked.name is not None and len(asked.name) > LONGEST_NAME:
        raise BadValue(f"cannot cancel: a pattern has at most {LONGEST_NAME} characters")
    if asked.user not in (None, caller.user):
        rights.check(Access.ADMIN, caller, f"cancel the jobs of {printable(asked.user[:40])}")
    named = _named(asked, caller)
    # Once, and not for each job: groups may come from a server.
    is_admin = rights.is_admin(caller)

    def chosen(job: Job) -> bool:
        if not named(job):
            return False
        if not is_admin:
            # Before the pattern: it would reveal names that the admin hides.
            rights.check(Access.MANAGER, caller, "cancel", job)
        return asked.name is None or fnmatchcase(job.name, asked.name)

    return chosen


def _named(asked: CancelJobsRequest, caller: Caller) -> Callable[[Job], bool]:
    """Return what tells whether a job has the ids and the owner of a request."""
    numbers = None if asked.jobs is None else frozenset(asked.jobs)
    only_own = asked.user is None and numbers is None and asked.array is None

    def named(job: Job) -> bool:
        return (
            (numbers is None or job.id in numbers)
            and (asked.array is None or is_element(job, asked.array))
            and (asked.user in (None, job.owner.user))
            and not (only_own and job.owner.uid != caller.uid)
        )

    return named


def is_element(job: Job, array: int, index: int | None = None) -> bool:
    """Return whether a job is in an array, with this index if one is given."""
    place = job.queue.array
    return place is not None and place.job == array and index in (None, place.index)
