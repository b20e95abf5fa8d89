"""What the arguments of `gpulease.lease` mean on the wire."""

import os
from datetime import timedelta
from typing import Any

import pytest

from gpulease.errors import BadValue
from gpulease.lease_api.acquire import claim_of, hold_request, seconds
from gpulease.units import GIB
from gpulease.wire.requests import ClaimRequest, HoldRequest


def claim(memory: str | int | None = "4G", **fields: Any) -> ClaimRequest:
    return claim_of(memory, **{"gpus": 1, "exclusive": False, "time_limit": None, **fields})


def request(**fields: Any) -> HoldRequest:
    given: dict[str, Any] = {
        "name": None, "wait": None, "visible": "uuid", "growth": False, "split": 1,
        "processes": None,
    }  # fmt: skip
    return hold_request(claim(), {"PATH": "/bin"}, **{**given, **fields})


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
    assert request(wait=span).wait == 1800.0


@pytest.mark.parametrize("span", [-1, float("nan"), float("inf"), timedelta(seconds=-1), "soon"])
def test_what_is_no_span_is_refused(span: float | str | timedelta) -> None:
    with pytest.raises(BadValue):
        seconds(span)


def test_no_wait_is_not_an_endless_one() -> None:
    assert request(wait=0).wait == 0.0
    assert request(wait=None).wait is None


def test_a_lease_of_no_time_is_refused() -> None:
    with pytest.raises(BadValue):
        claim(time_limit=0)


@pytest.mark.parametrize("fields", [{"gpus": 0}, {"gpus": -1}])
def test_a_lease_is_of_at_least_one_gpu(fields: dict[str, int]) -> None:
    with pytest.raises(BadValue):
        claim(**fields)


def test_the_holder_is_this_process() -> None:
    made = request(name="nb", visible="index", growth=True, split=2)
    assert made.pid == os.getpid()
    assert made.environment == {"PATH": "/bin"}
    assert (made.name, made.options.visible, made.options.split) == ("nb", "index", 2)
    assert made.options.growth


def test_a_split_has_equal_parts_or_sizes() -> None:
    made = request(split="1G,512M").options
    assert (made.split, made.split_sizes) == (2, [GIB, GIB // 2])
    assert request(split="3").options.split == 3
    for split in (0, -1, 65, "0", "", "1G,", "1G,x"):
        with pytest.raises(BadValue):
            request(split=split)


def test_a_lease_is_divided_between_at_least_one_process() -> None:
    assert request(processes=4).options.processes == 4
    with pytest.raises(BadValue):
        request(processes=0)
