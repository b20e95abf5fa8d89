"""A small torture: kills at random moments, and nothing that was promised is lost or done twice.

`make torture` is the large one.
"""

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torture import phases
from torture.machine import Zygote
from torture.verdict import Tally


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.mark.parametrize(("phase", "kills"), [(phases.kill_daemons, 15), (phases.kill_shims, 10)])
def test_kills_at_random_moments_break_no_promise(
    phase: Callable[..., Tally], kills: int, tmp_path: Path, zygote: Zygote
) -> None:
    seed = secrets.randbits(32)
    tally = phase(tmp_path, kills, random.Random(seed), lambda _: None, zygote)
    assert tally.kills >= kills
    assert tally.acknowledged > kills
    assert not tally.told, f"seed {seed}"
