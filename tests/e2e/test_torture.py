"""A short torture and a short chaos: what was promised is not lost, and done once.

`make torture` and `make chaos` are the large ones.
"""

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.rounds import Plan, run
from daemon_rig import Zygote
from torture import migrating, phases, steps
from torture.verdict import Tally

STEPS = 24
"""Of all between look, decide, commit and act; chance chooses them."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote("torture.zygote")
    yield made
    made.close()


@pytest.mark.parametrize(("phase", "kills"), [(phases.kill_daemons, 6), (phases.kill_shims, 6)])
def test_kills_at_random_moments_break_no_promise(
    phase: Callable[..., Tally], kills: int, tmp_path: Path, zygote: Zygote
) -> None:
    seed = secrets.randbits(32)
    tally = phase(tmp_path, kills, random.Random(seed), lambda _: None, zygote)
    assert tally.kills >= kills
    assert tally.acknowledged > 0
    assert not tally.told, f"seed {seed}"


def test_a_kill_at_any_step_breaks_no_promise(tmp_path: Path, zygote: Zygote) -> None:
    seed = secrets.randbits(32)
    chosen = random.Random(seed).sample(steps.STEPS, STEPS)
    tally = steps.kill_at_each_step(tmp_path, seed, zygote, lambda _: None, chosen)
    assert tally.kills == STEPS
    assert tally.acknowledged > STEPS / 2
    assert not tally.told, f"seed {seed}"


def test_a_kill_while_the_database_is_migrated_loses_nothing(
    tmp_path: Path, zygote: Zygote
) -> None:
    tally = migrating.kill_while_it_migrates(tmp_path, zygote, oldest_alone=True)
    assert tally.kills >= 8
    assert not tally.told


@pytest.mark.usefixtures("machines_pids")
def test_jobs_among_strangers_failing_calls_and_lost_gpus_get_what_there_is_and_end(
    tmp_path: Path,
) -> None:
    tally = run(tmp_path, Plan(jobs=40, within_s=120), 2026, lambda _: None)
    assert tally.told == []
    assert tally.grants >= 40
    assert tally.beside_strangers > 0
    assert tally.failed_calls > 0
