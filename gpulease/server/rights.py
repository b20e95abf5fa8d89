"""Who may do what: a table of routes is held against the caller that the kernel names."""

from enum import Enum, auto

from gpulease.domain.job import Job
from gpulease.errors import NotAllowed
from gpulease.server.peer import Caller


class Who(Enum):
    """Who may use a route."""

    ANYONE = auto()
    """Every local user."""
    OWNER = auto()
    """The job's owner, root, and the user whose daemon it is."""


def owns(caller: Caller, job: Job, daemon_uid: int) -> bool:
    """Tell whether `caller` may act on `job` and see all of it."""
    return caller.uid in (job.owner.uid, 0, daemon_uid)


def check(who: Who, caller: Caller, job: Job, daemon_uid: int, verb: str) -> None:
    """Check that `caller` may do `verb` with `job`.

    Raises:
        NotAllowed: they may not.
    """
    if who is Who.OWNER and not owns(caller, job, daemon_uid):
        raise NotAllowed(
            f"cannot {verb} job {job.id}: it belongs to {job.owner.user}",
            "gpulease list --user NAME shows the jobs of one user",
        )


def check_submit(caller: Caller, daemon_uid: int) -> None:
    """Check that a job can be run as `caller`: only root's daemon can become another user.

    Raises:
        NotAllowed: it cannot.
    """
    if daemon_uid not in (0, caller.uid):
        raise NotAllowed(
            "cannot submit: this daemon belongs to another user and runs jobs as them alone",
            "unset GPULEASE_SOCKET to use the system's daemon, or one of your own",
        )
