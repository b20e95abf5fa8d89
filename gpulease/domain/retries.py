"""When a job that has failed is tried again, and after how long.

A retry is for failures of the job itself. What gpulease or a person ended is no failure, and a
failure of the machine or of the size of the lease has options of its own.
"""

from collections.abc import Mapping
from datetime import timedelta

from gpulease.domain.job import Job, Outcome
from gpulease.domain.queue_options import LONGEST_RETRY_DELAY, QueueOptions

_BY_ITSELF = frozenset({Outcome.EXITED, Outcome.SIGNALED})
_TYPED = frozenset({2, 3})
"""SIGINT and SIGQUIT, which a terminal's keys send: somebody has ended the job."""
_AS_TYPED = frozenset(128 + each for each in _TYPED)
"""The statuses with which a shell ends after these signals."""
_STRICT_STATUS = 97
"""Of `--strict`: gpulease has refused to let a framework run without its limit."""
_MOST_DOUBLINGS = 20
"""More would not fit a timedelta."""


def is_tried_again(job: Job) -> bool:
    """Return whether a job that has ended, and that nobody asked to end, is to be tried again."""
    options, end = job.queue, job.exit
    if options.retried >= options.retries or job.outcome not in _BY_ITSELF or end is None:
        return False
    if end.status in (None, 0) or end.signal in _TYPED:
        return False
    return end.status in options.retry_on if options.retry_on else end.status not in _AS_TYPED


def is_refusal(job: Job, worker_options: Mapping[str, object]) -> bool:
    """Return whether gpulease itself has ended a job, which its owner wants to be so (--strict)."""
    refused = job.exit is not None and job.exit.code == _STRICT_STATUS
    return refused and bool(worker_options.get("strict")) and not job.queue.retry_on


def delay_of_retry(options: QueueOptions) -> timedelta:
    """Return how long the next retry waits: twice as long as the one before, up to an hour."""
    longer: int = 2 ** min(options.retried, _MOST_DOUBLINGS)
    return min(options.retry_delay * longer, LONGEST_RETRY_DELAY)
