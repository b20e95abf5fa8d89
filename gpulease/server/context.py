"""What all handlers of requests share: the daemon's objects, and how bodies are read and sent."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import State
from gpulease.errors import BadValue
from gpulease.server.auth import Caller, Rights, caller_in
from gpulease.server.job_views import JobViews
from gpulease.server.listings import Listings
from gpulease.server.machine_views import MachineViews
from gpulease.server.messages import Scope
from gpulease.server.request_limits import slot_in
from gpulease.server.validation import Defaults
from gpulease.server.view_sources import redact_job
from gpulease.service.hook_reports import HookReports
from gpulease.service.jobs import existing
from gpulease.service.ports import Clock, Event, ProcessFinder
from gpulease.service.refusals import named
from gpulease.service.scheduler import Scheduler
from gpulease.service.slurm_gpus import refuse_closed_queue
from gpulease.service.usage import PoolSeen, Usage
from gpulease.wire.jobs import JobView

Body = TypeVar("Body")

_MOST_DETAIL = 200
"""Characters of a parser's message that are shown."""


class Request:
    """A request, as handlers see it: its body has arrived."""

    def __init__(self, scope: Scope) -> None:
        self.caller = caller_in(scope)
        """The process that sent it."""
        self.slot = slot_in(scope)
        """What it takes of the limits of its user."""
        self._body: bytes = scope["state"]["body"]

    def read(self, kind: type[Body]) -> Body:
        """Return the body; without one, all fields have their defaults.

        Raises:
            BadValue: it is not JSON of this shape.
        """
        return read_body(kind, self._body or b"{}")


@dataclass(slots=True)
class RequestContext:
    """What most handlers work with. A reload of the settings changes some of the fields."""

    scheduler: Scheduler
    job_views: JobViews
    machine_views: MachineViews
    listings: Listings
    clock: Clock
    defaults: Defaults
    rights: Rights
    processes: ProcessFinder
    usage: Usage
    hooks: HookReports
    stored_pools: Callable[[JobId], Sequence[PoolSeen]]
    look: Callable[[], Awaitable[None]]
    """Reads the GPUs, unless that has just been done; to be awaited before they are shown."""

    def existing_job(self, job_id: int) -> Job:
        """Return a job.

        Raises:
            NoSuchJob: there is none with this id.
        """
        return existing(self.scheduler.store, JobId(job_id))

    async def gpu(self, name: str) -> GpuReading:
        """Return the GPU with an index, a UUID, or the only one with a prefix of its UUID.

        Raises:
            NoSuchGpu: no GPU matches, or several do.
        """
        seen, store = await self.scheduler.observer.recent(), self.scheduler.store
        present = {reading.uuid for reading in seen.readings}
        # A GPU that is out for repair can be resumed, and drained while jobs have leases on it.
        absent = [uuid for uuid in store.availabilities() if uuid not in present]
        return named(name, (*seen.readings, *map(store.gpu, absent)))

    def gpu_labels(self, gpus: Iterable[GpuUuid]) -> dict[GpuUuid, str]:
        """Return the labels of GPUs, of which some may be gone."""
        present, store = self.scheduler.observer.readings(), self.scheduler.store
        return {uuid: (present.get(uuid) or store.gpu(uuid)).label for uuid in gpus}

    def refuse_closed_queue(self, caller: Caller, verb: str) -> None:
        """Check that the queue of this daemon takes jobs of `caller`.

        Raises:
            NotAllowed: Slurm assigns all GPUs, and `caller` is no admin.
        """
        if not self.rights.is_admin(caller):
            refuse_closed_queue(self.scheduler.policy.slurm, verb)

    def redacted_for(self, caller: Caller) -> str | None:
        """Return the user for whom answers are redacted, None if `caller` may see all."""
        return caller.user if self.rights.redacts_for(caller) else None

    def view_for(self, caller: Caller, job: Job, *, with_events: bool = False) -> JobView:
        """Return a job as `caller` may see it."""
        events: Sequence[Event] = self.scheduler.store.events(job.id) if with_events else ()
        # The live pools and reports of an ended job may be gone, so they come from the database.
        is_over = bool(events) and job.state is State.ENDED
        pools = (self.usage.of(job.id) or self.stored_pools(job.id)) if is_over else None
        hooks = self.hooks.of(job.id) if events else None
        if is_over:
            hooks = self.scheduler.store.hook_reports(job.id)
        view = self.job_views.job(
            job, to_owner=self.rights.owns(caller, job), events=events, pools=pools, hooks=hooks
        )
        return redact_job(view, self.redacted_for(caller))


@dataclass(frozen=True, slots=True)
class HolderParts:
    """What a lease changes for the process that holds it, and who watches that process."""

    environment: Callable[[Job, Invocation, Job], Mapping[str, str]]
    """The variables of an invocation as the leases of a job change them."""
    command: Callable[[Job, Invocation], tuple[Sequence[str], str]]
    """The command of an invocation as they change it, and a line for its user or ""."""
    watch: Callable[[Job], None]
    """Removes a hold from the queue when the process that asked for it ends."""


def acting_on(caller: Caller, job: Job) -> str:
    """Return who acts on a job: its owner by the name on record, which may have changed since."""
    return job.owner.user if caller.uid == job.owner.uid else caller.user


def read_body(kind: type[Body], content: bytes) -> Body:
    """Return what JSON contains.

    Raises:
        BadValue: it is not JSON of this shape.
    """
    # msgspec stops at the first error, however much follows.
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadValue(f"cannot read the request: {str(error)[:_MOST_DETAIL]}") from error
