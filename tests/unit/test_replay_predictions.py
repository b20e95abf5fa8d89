"""How good expected starts are, as a replay measures it."""

from fakes import G
from gpulease.domain.queue_policy import QueuePolicy
from gpulease.replay.engine import replay
from gpulease.replay.predictions import StartErrors, StartPredictions
from gpulease.replay.trace import Server, TraceJob

HOUR = 3600.0


def test_the_first_prediction_for_a_job_is_compared_with_its_start() -> None:
    # Without a history, every job is predicted to run for four hours.
    jobs = [TraceJob(1, 0.0, 3 * HOUR, 1, 8 * G, "alice"), TraceJob(2, 0.0, 1, 1, 8 * G, "alice")]
    predictions = StartPredictions(every=1)

    runs = replay(jobs, [Server(1, 8 * G)], QueuePolicy(), observe=predictions)

    assert predictions.errors(runs) == StartErrors(1, 1 * HOUR, 3 * HOUR)


def test_nothing_is_compared_if_no_job_waits() -> None:
    predictions = StartPredictions(every=1)
    runs = replay(
        [TraceJob(1, 0.0, HOUR, 1, G, "alice")],
        [Server(1, 8 * G)],
        QueuePolicy(),
        observe=predictions,
    )
    assert predictions.errors(runs) is None
