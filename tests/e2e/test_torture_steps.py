"""A kill at each step between look, decide, commit and act; see `torture.steps` for them all."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from torture import migrating, steps
from torture.machine import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def test_a_kill_at_any_step_breaks_no_promise(tmp_path: Path, zygote: Zygote) -> None:
    seed = secrets.randbits(32)
    tally = steps.kill_at_each_step(tmp_path, seed, zygote, lambda _: None)
    assert tally.kills == len(steps.STEPS)
    assert tally.acknowledged > len(steps.STEPS) / 2
    assert not tally.told, f"seed {seed}"


def test_a_kill_while_the_database_is_migrated_loses_nothing(
    tmp_path: Path, zygote: Zygote
) -> None:
    tally = migrating.kill_while_it_migrates(tmp_path, zygote)
    assert tally.kills >= 8
    assert not tally.told
