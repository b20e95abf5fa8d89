"""What is told of those who wait, and of what they ask for."""

from dataclasses import dataclass
from datetime import timedelta

from gpulease.domain.claim import Claim
from gpulease.domain.placement import Hindrance
from gpulease.domain.plan import Plan, Waiting
from gpulease.server.reasons import why_it_waits
from gpulease.units import Share
from gpulease.wire import ClaimView, RefusalView


@dataclass(frozen=True, slots=True)
class Words:
    """What is the same of all who ask for the same and wait for the same."""

    waiting: Waiting
    claim: ClaimView
    why: str | None
    refusals: list[RefusalView]
    waits_for: list[int]


class Told:
    """What is told of those who wait, as of one plan: in long queues, much the same of many."""

    def __init__(self, plan: Plan | None, before: "Told | None" = None) -> None:
        self.plan = plan
        self._before = before._latest if before is not None else {}
        self._latest: dict[Claim, Waiting] = {}
        self._settled: dict[int, tuple[Waiting, Waiting]] = {}
        self._words: dict[tuple[Claim, int], Words] = {}

    def settled(self, claim: Claim, waiting: Waiting) -> Waiting:
        """Return `waiting`, or its equal from an earlier plan."""
        known = self._settled.get(id(waiting))
        if known is None:
            former = self._before.get(claim)
            known = waiting, former if former == waiting and former is not None else waiting
            self._settled[id(waiting)] = known
            self._latest[claim] = known[1]
        return known[1]

    def of(self, claim: Claim, waiting: Waiting) -> Words:
        """Return what is told of a claim that waits like this."""
        key = claim, id(waiting)
        if key not in self._words:
            self._words[key] = Words(
                waiting,
                claim_view(claim),
                why_it_waits(claim, waiting, None if self.plan is None else len(self.plan.gpus)),
                [refusal_view(each) for each in waiting.refusal.hindrances],
                list(waiting.refusal.waits_for),
            )
        return self._words[key]


def claim_view(claim: Claim) -> ClaimView:
    """Return a claim as a wire object."""
    share = claim.memory if isinstance(claim.memory, Share) else None
    return ClaimView(
        memory=None if isinstance(claim.memory, Share) else claim.memory,
        share=float(share.percent) if share else None,
        gpus=claim.gpus,
        exclusive=claim.exclusive,
        time_limit=seconds(claim.time_limit),
    )


def refusal_view(each: Hindrance) -> RefusalView:
    """Return why one GPU cannot take a job, as a wire object."""
    return RefusalView(each.gpu, each.index, each.why, each.label)


def seconds(span: timedelta | None) -> float | None:
    """Return a span as the wire has it."""
    return None if span is None else span.total_seconds()
