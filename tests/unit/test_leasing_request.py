"""What the arguments of `gpulease.lease` mean on the wire."""

import inspect
from datetime import timedelta
from typing import Any

import pytest

from gpulease.errors import BadValue
from gpulease.lease_api import acquire
from gpulease.lease_api.api import lease
from gpulease.options import seconds
from gpulease.units import GIB
from gpulease.wire.requests import ClaimRequest, WorkerOptionsRequest


def requested(**given: Any) -> tuple[ClaimRequest, WorkerOptionsRequest, dict[str, Any]]:
    arguments = dict.fromkeys(inspect.signature(lease).parameters) | {"split": 1} | given
    return acquire.requested(**arguments)


def claim(memory: str | int | None = "4G", **given: Any) -> ClaimRequest:
    return requested(memory=memory, **given)[0]


@pytest.mark.parametrize(
    ("memory", "size", "share"),
    [("4G", 4 * GIB, None), (4 * GIB, 4 * GIB, None), ("40%", None, 40.0), (None, None, None)],
)
def test_memory_is_a_size_bytes_a_share_or_the_default(
    memory: str | int | None, size: int | None, share: float | None
) -> None:
    found = claim(memory)
    assert (found.memory, found.share) == (size, share)


@pytest.mark.parametrize("memory", [4, 0, -1, "", "4", "much", "-4G", "140%"])
def test_memory_that_cannot_be_meant_is_refused(memory: str | int) -> None:
    with pytest.raises(BadValue):
        claim(memory)


def test_a_small_number_is_taken_for_forgotten_units() -> None:
    with pytest.raises(BadValue) as refused:
        claim(4)
    assert refused.value.hint == 'did you mean "4G"?'


@pytest.mark.parametrize("span", [1800, 1800.0, "30m", timedelta(minutes=30)])
def test_spans_are_seconds_words_or_timedeltas(span: float | str | timedelta) -> None:
    assert seconds(span) == 1800.0
    assert claim(time_limit=span).time_limit == 1800.0
    assert requested(wait=span)[2]["wait"] == 1800.0


@pytest.mark.parametrize("span", [-1, float("nan"), float("inf"), timedelta(seconds=-1), "soon"])
def test_what_is_no_span_is_refused(span: float | str | timedelta) -> None:
    with pytest.raises(BadValue):
        seconds(span)


def test_no_wait_is_not_an_endless_one() -> None:
    assert requested(wait=0)[2]["wait"] == 0.0
    assert requested(wait=None)[2]["wait"] is None


def test_named_gpus_are_all_leased_unless_a_number_is_given() -> None:
    assert (claim(gpu=[0, "1,2"]).named, claim(gpu=[0, "1,2"]).gpus) == (["0", "1", "2"], 3)
    assert claim(gpu="0,1", gpus=1).gpus == 1
    for nothing in ("", [], "0,"):
        with pytest.raises(BadValue, match="gpu="):
            claim(gpu=nothing)


def test_a_split_has_equal_parts_or_sizes() -> None:
    made = requested(split="1G,512M")[1]
    assert (made.split, made.split_sizes) == (2, [GIB, GIB // 2])
    assert requested(split="3")[1].split == 3
    for split in (0, -1, 65, "0", "", "1G,", "1G,x"):
        with pytest.raises(BadValue):
            requested(split=split)
