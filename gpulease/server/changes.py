"""The routes that change several jobs at once: cancel, edit, move. Each is one transaction."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.errors import BadValue
from gpulease.server.auth import Access, Caller, Rights
from gpulease.server.context import Request, RequestContext, acting_on
from gpulease.server.job_requests import edit_of
from gpulease.server.messages import Response, json_response
from gpulease.server.validation import span
from gpulease.service.editing import Move, refuse_unless_queued
from gpulease.setting_parsers import LONGEST_GRACE
from gpulease.wire.jobs import CancelledView, EditedJobView, EditedView
from gpulease.wire.requests import (
    LONGEST_NAME,
    MOST_ELEMENTS,
    CancelJobsRequest,
    EditRequest,
    MoveRequest,
)
from gpulease.wire.text import clean

_MOST_NAMED = 20
"""Jobs in an answer; the others are counted."""


class ChangeHandlers:
    """One method for each route. They check that the caller may change each of the jobs."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    async def cancel(self, request: Request) -> Response:
        """Cancel all jobs that match."""
        caller, context = request.caller, self._context
        asked = request.read(CancelJobsRequest)
        grace = span("grace", asked.grace, LONGEST_GRACE)
        chosen = chosen_by(asked, caller, context.rights)
        await request.slot.for_expensive()
        cancelled = await context.scheduler.cancel_all(chosen, partial(acting_on, caller), grace)
        return json_response(
            CancelledView(
                len(cancelled),
                sum(job.state is not State.ENDED for job in cancelled),
                [context.view_for(caller, job) for job in cancelled[:_MOST_NAMED]],
            )
        )

    async def edit(self, request: Request) -> Response:
        """Change what waiting jobs ask for."""
        caller, context = request.caller, self._context
        asked = request.read(EditRequest)
        jobs = self._own(caller, "edit", asked)
        wanted = edit_of(asked, is_admin=context.rights.is_admin(caller))
        await request.slot.for_expensive()
        edited = await context.scheduler.edit(jobs, wanted, caller.user)
        return _reply((each.job, each.changes) for each in edited)

    async def move(self, request: Request) -> Response:
        """Move waiting jobs before another one."""
        caller, context = request.caller, self._context
        asked = request.read(MoveRequest)
        jobs = self._own(caller, "move", asked)
        before = None if asked.before is None else context.existing_job(asked.before)
        is_admin = context.rights.is_admin(caller)
        target = None if before is None else before.id
        wanted = Move(target, caller.uid, caller.user, is_admin)
        await request.slot.for_expensive()
        place = "first" if before is None else f"before job {before.label}"
        return _reply((job, (place,)) for job in await context.scheduler.move(jobs, wanted))

    def _own(self, caller: Caller, verb: str, asked: EditRequest | MoveRequest) -> Sequence[JobId]:
        """Return the jobs that a request names, each once.

        Raises:
            BadValue: there are none, or too many.
            NoSuchJob: one of them does not exist.
            NotAllowed: one of them belongs to another user.
            WrongState: one of them does not wait, or none of them does.
        """
        numbers = list(dict.fromkeys(asked.jobs))
        if not 0 < len(numbers) <= MOST_ELEMENTS:
            raise BadValue(f"cannot {verb} {len(numbers)} jobs: 1 to {MOST_ELEMENTS} at once")
        if asked.only_waiting:
            live = {job.id: job for job in self._context.scheduler.store.live()}
            waiting = (live.get(JobId(number)) for number in numbers)
            numbers = [job.id for job in waiting if job and job.state is State.QUEUED] or numbers
        is_admin = self._context.rights.is_admin(caller)
        jobs = []
        for number in numbers:
            job = self._context.existing_job(number)
            if not is_admin:
                self._context.rights.check(Access.MANAGER, caller, verb, job)
            # Ended jobs are read from the disk: one is refused before the next one is read.
            refuse_unless_queued(job, verb)
            jobs.append(job.id)
        return jobs


def _reply(edited: Iterable[tuple[Job, Sequence[str]]]) -> Response:
    views = [EditedJobView(job.id, job.label, job.name, list(changes)) for job, changes in edited]
    return json_response(EditedView(len(views), views[:_MOST_NAMED]))


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
        rights.check(Access.ADMIN, caller, f"cancel the jobs of {clean(asked.user[:40])}")
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
        array = job.queue.array
        return (
            (numbers is None or job.id in numbers)
            and (asked.array is None or (array is not None and array.job == asked.array))
            and (asked.user in (None, job.owner.user))
            and not (only_own and job.owner.uid != caller.uid)
        )

    return named
