"""Who may do what: a table of routes is held against the caller that the kernel names."""

import grp
from dataclasses import dataclass
from enum import Enum, auto

from gpulease.domain.job import Job
from gpulease.errors import NotAllowed
from gpulease.server.peer import Caller


class Who(Enum):
    """Who may use a route."""

    ANYONE = auto()
    """Every local user."""
    SUBMITTER = auto()
    """The users as whom the daemon can run jobs: all where it is root's, else its own user."""
    MANAGER = auto()
    """The job's owner, and the admins: they may act on it, and see what it runs."""
    OWNER = auto()
    """The job's owner: what it printed and its environment may hold secrets."""
    ADMIN = auto()
    """The admins alone: it concerns everyone."""


ABOUT_A_JOB = frozenset({Who.MANAGER, Who.OWNER})


@dataclass(frozen=True, slots=True)
class Rights:
    """Who is more than a user here: root, whose daemon it is, and a group of admins."""

    daemon_uid: int
    admins: str | None = None
    """The name of the group; a daemon of one user has none."""
    hide_commands: bool = False
    """Whether what a job runs is for its managers alone."""

    def is_master(self, caller: Caller) -> bool:
        """Tell whether `caller` could do everything anyway."""
        return caller.uid in (0, self.daemon_uid)

    def is_admin(self, caller: Caller) -> bool:
        """Tell whether `caller` may act on everyone's jobs."""
        return self.is_master(caller) or self._admins_gid() in (caller.gid, *(caller.groups or ()))

    def hides_from(self, caller: Caller) -> bool:
        """Tell whether what others run is hidden from `caller`."""
        return self.hide_commands and not self.is_admin(caller)

    def has(self, who: Who, caller: Caller, job: Job) -> bool:
        """Tell whether `caller` may do with `job` what is open to MANAGER or OWNER."""
        above = self.is_master(caller) if who is Who.OWNER else self.is_admin(caller)
        return caller.uid == job.owner.uid or above

    def check(self, who: Who, caller: Caller, verb: str, job: Job | None = None) -> None:
        """Check that `caller` is among `who` and so may do `verb`, with `job` if it is about one.

        Raises:
            NotAllowed: they may not.
        """
        match who:
            case Who.ANYONE:
                return
            case Who.SUBMITTER:
                self._check_submitter(caller)
            case Who.MANAGER | Who.OWNER:
                assert job is not None, "the router finds the job"
                self._check_job(who, caller, verb, job)
            case Who.ADMIN:
                self._check_admin(caller, verb)

    def _check_submitter(self, caller: Caller) -> None:
        # Only root's daemon can become another user.
        if self.daemon_uid not in (0, caller.uid):
            raise NotAllowed(
                "cannot submit: this daemon belongs to another user and runs jobs as them alone",
                "unset GPULEASE_SOCKET to use the system's daemon, or one of your own",
            )

    def _check_job(self, who: Who, caller: Caller, verb: str, job: Job) -> None:
        if not self.has(who, caller, job):
            raise NotAllowed(
                f"cannot {verb} job {job.id}: it belongs to {job.owner.user}",
                "only its owner and root may"
                if who is Who.OWNER
                else "only its owner, the machine's admins and root may",
            )

    def _check_admin(self, caller: Caller, verb: str) -> None:
        if self.is_admin(caller):
            return
        group = f"members of the group {self.admins}" if self.admins else "whose daemon it is"
        raise NotAllowed(
            f"cannot {verb}: that is for the admins of this machine", f"root and {group} may"
        )

    def _admins_gid(self) -> int | None:
        # Looked up each time, since a group may be made or made anew while the daemon runs.
        try:
            return grp.getgrnam(self.admins).gr_gid if self.admins else None
        except KeyError:
            return None
