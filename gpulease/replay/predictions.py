"""How good the expected starts of waiting jobs are: predicted in a replay, then compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gpulease.domain.explain import Explanations
from gpulease.domain.gpu import JobId
from gpulease.replay.engine import Moment
from gpulease.replay.trace import Run

EVERY = 200
"""Decisions from one prediction to the next: a forward run costs as much as many decisions."""


@dataclass(frozen=True, slots=True)
class StartErrors:
    """The errors of the first predictions for jobs."""

    jobs: int
    median_error_s: float
    """Of the absolute differences between predicted and actual start."""
    median_wait_s: float
    """Of what they still waited when the prediction was made, to compare with."""


class StartPredictions:
    """Observes a replay, and predicts the starts of the jobs that wait now and then."""

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._seen = 0
        self._first: dict[JobId, tuple[float, float]] = {}
        """When each job was predicted first, and the start; seconds of the trace."""

    def __call__(self, moment: Moment) -> None:
        """Predict starts, if it is time for that."""
        self._seen += 1
        if self._seen % self._every:
            return
        snapshot = moment.snapshot
        decided = replace(moment.plan, snapshot=replace(snapshot, queue=None))
        for job, start in Explanations(decided).starts.items():
            start_s = moment.at_s + (start.at - snapshot.at).total_seconds()
            self._first.setdefault(job, (moment.at_s, start_s))

    def errors(self, runs: Sequence[Run]) -> StartErrors | None:
        """Compare the predictions with what happened; None if no job waited."""
        pairs = [
            (run.start_s, *self._first[JobId(run.job.id)])
            for run in runs
            if run.job.id in self._first
        ]
        if not pairs:
            return None
        return StartErrors(
            len(pairs),
            median(abs(actual - predicted) for actual, _, predicted in pairs),
            median(actual - at for actual, at, _ in pairs),
        )
