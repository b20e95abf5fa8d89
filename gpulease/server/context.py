"""What the handlers of requests have at hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Invocation, Job, Owner, UserUsage
from gpulease.server.auth import Rights
from gpulease.server.job_views import Views
from gpulease.server.listings import Listings
from gpulease.server.validation import Defaults
from gpulease.service.health import Drains
from gpulease.service.ports import Clock, ProcessFinder
from gpulease.service.scheduler import Scheduler
from gpulease.service.usage import PoolSeen, Usage
from gpulease.wire.views import DoctorView, OveruseView


@dataclass(slots=True)
class RequestContext:
    """All that the handlers work with; what the admin may change is read anew at each request."""

    keeper: Scheduler
    views: Views
    board: Listings
    clock: Clock
    defaults: Defaults
    rights: Rights
    directory_of: Callable[[JobId], Path]
    log_limit: int
    most_streams: int
    """Of one user at once; root has no such bound."""
    doctor: Callable[[], DoctorView]
    overuse_of: Callable[[Owner], OveruseView]
    """What becomes of a user's jobs that hold more than their lease."""
    processes: ProcessFinder
    drains: Drains
    environment: Callable[[Job, Invocation], Mapping[str, str]]
    """The variables of an invocation as they are under the leases of a job."""
    usage: Usage
    stored_pools: Callable[[JobId], Sequence[PoolSeen]]
    uses: Callable[[str | None, datetime | None], Sequence[UserUsage]]
    """What the ended jobs of a user, or of all, asked for and used from some time on."""
    watch_asker: Callable[[Job], None]
    """Sees to it that a lease without a job leaves the queue with who asked for it."""
