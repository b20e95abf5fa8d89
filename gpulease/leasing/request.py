"""From the arguments of `gpulease.lease` to the request that the daemon reads."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal

from gpulease.errors import BadValue
from gpulease.units import Share, parse_memory, parse_span
from gpulease.wire import ClaimRequest, HoldRequest, WorkerOptionsRequest, to_wire

Span = float | str | timedelta
"""Seconds, or "30m", or a timedelta."""
Visible = Literal["uuid", "index"]


def claim_of(
    memory: str | int | None, gpus: int, exclusive: bool, time_limit: Span | None
) -> ClaimRequest:
    """Return what is asked for; `memory` is bytes, "4G", "40%", or None for the default.

    Raises:
        BadValue: one of them says something that cannot be.
    """
    if gpus < 1:
        raise BadValue(
            f"cannot lease {gpus} GPUs: a lease is of at least one", "leave out gpus= for one"
        )
    asked = parse_memory(memory) if isinstance(memory, str) else _bytes(memory)
    return ClaimRequest(
        memory=None if isinstance(asked, Share) else asked,
        share=float(asked.percent) if isinstance(asked, Share) else None,
        gpus=gpus,
        exclusive=exclusive,
        time_limit=None if time_limit is None else _positive(time_limit),
    )


def _bytes(memory: int | None) -> int | None:
    if memory is not None and memory < 2**20:
        raise BadValue(
            f"cannot lease {memory} bytes: a number is read as bytes",
            f'did you mean "{memory}G"?' if 0 < memory < 1024 else 'write a size as "4G"',
        )
    return memory


def seconds(span: Span) -> float:
    """Return a length of time in seconds, 0 included.

    Raises:
        BadValue: it is not a length of time, or is below zero.
    """
    if isinstance(span, str):
        return parse_span(span).total_seconds()
    amount = span.total_seconds() if isinstance(span, timedelta) else float(span)
    if not 0 <= amount < float("inf"):
        raise BadValue(
            f"cannot use the time {span!r}: it must be zero or above, and have an end",
            'write seconds, "30m", or a timedelta; None has no end',
        )
    return amount


def _positive(span: Span) -> float:
    if amount := seconds(span):
        return amount
    raise BadValue(f"cannot use the time {span!r}: it must be above zero")


def hold_request(
    claim: ClaimRequest,
    environment: Mapping[str, str],
    *,
    name: str | None,
    wait: Span | None,
    visible: Visible,
    growth: bool,
    split: int,
) -> HoldRequest:
    """Return the request for a lease that this process holds.

    Raises:
        BadValue: an argument says something that cannot be.
    """
    if split < 1:
        raise BadValue(f"cannot use split={split}: it must be at least 1")
    return HoldRequest(
        environment={to_wire(key): to_wire(value) for key, value in environment.items()},
        pid=os.getpid(),
        claim=claim,
        options=WorkerOptionsRequest(visible=visible, growth=growth, split=split),
        name=name,
        wait=None if wait is None else seconds(wait),
    )
