"""How long a job on all GPUs of a small server waits in an endless stream of short jobs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpulease.domain.queue_options import QueuePolicy
from gpulease.replay.engine import replay
from gpulease.replay.trace import Server, TraceJob
from gpulease.units import GIB

SIZES = (2, 4, 8)
"""GPUs of a server."""
LENGTHS_S = (2.0, 60.0, 300.0)
"""Mean run times of the jobs of a stream."""
_USERS = 4
_LOAD = 1.25
"""What a stream asks for, as a part of what the server can do: a queue forms, and never ends."""
_STREAM = 200
"""A stream lasts for so many mean run times."""
_EVERY = 20
"""And a job on all GPUs is submitted each time that so many have passed."""
_WIDE = "wide"
_UNKNOWN = 2
"""The first jobs of the user, whose run times are not known yet."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Jobs of one length on half a GPU each, by several users, and now and then one on all GPUs."""

    gpus: int
    length_s: float

    def trace(self) -> list[TraceJob]:
        """Return the jobs, with ids in the order of submission."""
        end_s, apart_s = _STREAM * self.length_s, self.length_s / (2 * self.gpus * _LOAD)
        small = TraceJob(0, 0.0, self.length_s, 1, 12 * GIB, "")
        jobs = [
            replace(
                small,
                submit_s=number * apart_s,
                duration_s=self.length_s * (0.5 + number * 7 % 11 / 10),
                user=f"user{number % _USERS}",
            )
            for number in range(int(end_s / apart_s))
        ]
        wide = replace(small, gpus=self.gpus, memory=24 * GIB, user=_WIDE)
        jobs += [
            replace(wide, submit_s=number * _EVERY * self.length_s)
            for number in range(1, _STREAM // _EVERY)
        ]
        jobs.sort(key=lambda job: job.submit_s)
        return [replace(job, id=number) for number, job in enumerate(jobs, 1)]

    def bound_s(self, policy: QueuePolicy) -> float:
        """Return the longest wait that the rule allows.

        The job is due after a multiple of its length. Older due jobs go first: of each user, so
        many gain age at once. Then it waits for the end of the longest running job.
        """
        longest = 1.5 * self.length_s
        older = _USERS * policy.aging_jobs * longest / (2 * self.gpus)
        return policy.reservation_slowdown * self.length_s + longest + older


def worst_wait_s(stream: Stream) -> float:
    """Return the longest wait of a job on all GPUs, in seconds."""
    runs = replay(stream.trace(), [Server(stream.gpus, 24 * GIB)], QueuePolicy())
    wide = [run for run in runs if run.job.user == _WIDE]
    return max(run.wait_s for run in wide[_UNKNOWN:])


def streams() -> Iterator[Stream]:
    """Yield every size of a server with every length of jobs."""
    for gpus in SIZES:
        for length_s in LENGTHS_S:
            yield Stream(gpus, length_s)
