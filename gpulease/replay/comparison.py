"""Replays one trace under several settings at once, each in a process of its own."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from signal import SIG_DFL, SIGINT, signal

from gpulease.domain.queue_policy import PolicyName, QueuePolicy
from gpulease.replay.engine import Contention, replay
from gpulease.replay.metrics import Figures, UserFigures, by_user, figures
from gpulease.replay.placements import placement_named
from gpulease.replay.predictions import EVERY, StartErrors, StartPredictions
from gpulease.replay.trace import Run, Server, TraceJob

_FEW_JOBS = 200
"""So many take less time than starting processes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to replay a trace. The values are those of the command line."""

    policy: str = "fair"
    whole_gpus: bool = False
    contention: str = "none"
    placement: str = "best"

    @property
    def name(self) -> str:
        """The settings in two words: the policy, and what a job gets."""
        return f"{self.policy}, {'whole GPUs' if self.whole_gpus else 'leases'}"


@dataclass(frozen=True, slots=True)
class Result:
    """A replay under some settings."""

    settings: Settings
    runs: list[Run]
    figures: Figures
    users: list[UserFigures]
    starts: StartErrors | None = None
    """How good predictions of starts were; None for what is compared with, or if no job waited."""


def baselines(asked: Settings) -> list[Settings]:
    """Return what to compare with: whole GPUs, under EASY (as Slurm does) and under FIFO."""
    whole = replace(asked, whole_gpus=True, placement="best")
    return [each for policy in ("easy", "fifo") if (each := replace(whole, policy=policy)) != asked]


def compare(
    jobs: Sequence[TraceJob], servers: Sequence[Server], all_settings: Sequence[Settings]
) -> list[Result]:
    """Return the replays of `jobs` under each of the settings, in that order.

    For the first of them, starts are predicted.
    """
    one = partial(_result, jobs, servers)
    predicts = [True, *(False for _ in all_settings[1:])]
    if len(jobs) <= _FEW_JOBS:
        return list(map(one, all_settings, predicts))
    workers = min(len(all_settings), len(os.sched_getaffinity(0)))
    # At Ctrl-C, which the processes get too, they end without a traceback.
    quiet = partial(signal, SIGINT, SIG_DFL)
    with ProcessPoolExecutor(workers, get_context("spawn"), quiet) as pool:
        return list(pool.map(one, all_settings, predicts))


def _result(
    jobs: Sequence[TraceJob], servers: Sequence[Server], settings: Settings, predicts: bool
) -> Result:
    every = EVERY if len(jobs) > _FEW_JOBS else 1
    predictions = StartPredictions(every) if predicts else None
    runs = replay(
        jobs,
        servers,
        QueuePolicy(PolicyName(settings.policy)),
        whole_gpus=settings.whole_gpus,
        contention=Contention(settings.contention),
        placement=placement_named(settings.placement, jobs),
        observe=predictions,
    )
    starts = predictions.errors(runs) if predictions else None
    return Result(settings, runs, figures(runs, servers), by_user(runs), starts)
