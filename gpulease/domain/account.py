"""What a job is remembered by: its likes, what it took, and that it was tried again."""

from dataclasses import dataclass
from fractions import Fraction

from gpulease.domain.memory import JobId


@dataclass(frozen=True, slots=True)
class Shape:
    """By what the runs of one script are recognised; each is a digest, and tells nobody what ran.

    Made by `shape.shape_of`.
    """

    alike: str
    """Of all runs of this script with options of the same names."""
    same: str
    """Of those with the same words all along."""


@dataclass(frozen=True, slots=True)
class Account:
    """What is kept of a job beside its leases, to size the next one like it."""

    shape: Shape | None = None
    sized: str | None = None
    """Why its lease is as large as it is, if nobody said how large it was to be."""
    retry: Fraction | None = None
    """How much more memory it gets if it runs out; None: it is not tried again."""
    attempt: int = 0
    """How often it was tried before."""
    retry_of: JobId | None = None
    """The job that ran out of memory, and that this one tries again."""
    retried_as: JobId | None = None
    out_of_memory: bool = False
    """It ended because the GPU memory of its lease did not do."""


NO_ACCOUNT = Account()
"""Of a job that nothing is kept of, such as a lease without a job."""


@dataclass(frozen=True, slots=True)
class Use:
    """What the ended jobs of one user asked for and used, where the use is known."""

    user: str
    jobs: int
    out_of_memory: int
    """How many of them ended for want of GPU memory."""
    seconds: float
    """How long they held their leases, added up over GPUs."""
    asked: float
    """Bytes leased, times the seconds for which they were."""
    used: float
    """The same of what they needed at most."""
