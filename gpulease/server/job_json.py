"""Jobs as JSON, as they stand in listings.

A job that has never run is joined from a template and the few values that differ: a long queue
consists of such jobs.
"""

from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from gpulease.domain.job import NO_ACTIVITY, Job
from gpulease.domain.lease import Claim, State
from gpulease.server.job_views import JobViews, WaitState
from gpulease.server.queue_positions import Row
from gpulease.server.reasons import WaitExplanation
from gpulease.server.redaction import HIDDEN, redact_job
from gpulease.server.view_sources import instant
from gpulease.wire.jobs import ArrayWaitingView, JobView, QueueView
from gpulease.wire.text import ranges

_NULL = b"null"
_MOST_KEPT = 2000
"""Claims, and explanations, that are kept as JSON."""

_VARYING = (
    "id", "name", "user", "reason", "position", "expected_start_at", "command", "claim",
    "submitted_at", "kind", "terminal", "grace", "gives_up_at", "refusals", "waits_for", "behind",
    "waits_for_labels", "behind_label", "sized", "retry_of", "label", "queue", "notify",
)  # fmt: skip
"""The fields in which jobs that have never run differ, in their order in a JobView."""

_what_runs_change = attrgetter(
    "granted_at", "started_at", "ended_at", "main_exited_at", "kept_until_at", "leases", "pid",
    "outcome", "exit", "utilization", "activity", "usage.out_of_memory", "usage.retried_as",
)  # fmt: skip
_NEVER_RUN = (None, None, None, None, None, (), None, None, None, None, NO_ACTIVITY, False, None)

_encode = msgspec.json.Encoder().encode


def _template() -> list[bytes]:
    """Return the JSON of a job that has never run, cut where the values belong."""
    mark: Any = msgspec.Raw(b"\0")  # no JSON contains it
    constant: dict[str, Any] = {
        "state": "queued", "outcome": None, "leases": [], "granted_at": None, "started_at": None,
        "ended_at": None, "expires_at": None, "exit_status": None, "pid": None, "directory": None,
    }  # fmt: skip
    return _encode(JobView(**constant, **dict.fromkeys(_VARYING, mark))).split(b"\0")


_TEMPLATE = _template()
assert [each.name for each in fields(JobView) if each.name in _VARYING] == [*_VARYING]


class _Why(NamedTuple):
    """Why jobs wait, as JSON."""

    reason: bytes
    refusals: bytes
    waits_for: bytes
    behind: bytes
    waits_for_labels: bytes = b"[]"
    behind_label: bytes = _NULL


class JobJson:
    """Writes jobs as JSON. For one thread."""

    def __init__(self, views: JobViews) -> None:
        self._views = views
        self._claims: dict[Claim, bytes] = {}
        self._whys: dict[int, tuple[WaitExplanation, _Why]] = {}
        """By the identity of the explanation."""

    def of(self, job: Job, viewer: str | None = None, *, to_owner: bool = False) -> bytes:
        """Return a job as every user may see it, or as its owner may.

        For a `viewer`, what other users run is hidden.
        """
        if _has_never_run(job):
            return self._waiting(job, self._views.wait(job), viewer)
        return self._drawn(self._views.job(job, to_owner=to_owner), viewer)

    def row(self, row: Row, viewer: str | None = None) -> bytes:
        """Return the first job of a row with its position. It stands for the others."""
        job, position = row[0]
        waits = self._views.wait(job)._replace(position=position)
        queue = self._views.queue(job.queue, waits.block)
        if len(row) > 1:
            arrays = (each.queue.array for each, _ in row)
            indices = sorted(array.index for array in arrays if array is not None)
            queue.array_waiting = ArrayWaitingView(ranges(indices), len(indices))
        if _has_never_run(job):
            return self._waiting(job, waits, viewer, queue)
        view = replace(self._views.job(job), position=position, queue=queue)
        return self._drawn(view, viewer)

    def _drawn(self, view: JobView, viewer: str | None) -> bytes:
        return _encode(view if viewer is None else redact_job(view, viewer))

    def _waiting(
        self, job: Job, waits: WaitState, viewer: str | None, queue: QueueView | None = None
    ) -> bytes:
        why, usage = self._why(waits), job.usage
        is_hidden = viewer not in (None, job.owner.user)
        parts = [b""] * (2 * len(_TEMPLATE) - 1)
        parts[::2] = _TEMPLATE
        parts[1::2] = (
            b"%d" % job.id,
            _encode(HIDDEN if is_hidden else job.name),
            _encode(job.owner.user),
            why.reason,
            _number(waits.position),
            _NULL if waits.start_at is None else _instant(waits.start_at),
            _encode(HIDDEN if is_hidden else job.command),
            self._claim(job.claim),
            _instant(job.submitted_at),
            b'"%s"' % job.kind.encode(),
            b"true" if job.terminal else b"false",
            _encode(self._views.grace(job)),
            _NULL if job.gives_up_at is None else _instant(job.gives_up_at),
            why.refusals,
            why.waits_for,
            why.behind,
            why.waits_for_labels,
            why.behind_label,
            _NULL if is_hidden or usage.size_reason is None else _encode(usage.size_reason),
            _number(usage.retry_of),
            _encode(job.label),
            _encode(queue or self._views.queue(job.queue, waits.block)),
            _encode(job.notify),
        )
        return b"".join(parts)

    def _why(self, waits: WaitState) -> _Why:
        found = waits.explanation
        if found is None:
            return _Why(_encode(waits.reason), b"[]", b"[]", _NULL)
        known = self._whys.get(id(found))
        if known is None or known[0] is not found:
            if len(self._whys) >= _MOST_KEPT:
                self._whys.clear()
            rest = (
                _encode(found.refusals), _encode(found.waits_for), _number(found.behind),
                _encode(found.waits_for_labels), _encode(found.behind_label),
            )  # fmt: skip
            known = self._whys[id(found)] = found, _Why(_encode(found.why), *rest)
        why = known[1]
        # A pause of the queue goes before the reason.
        return why if waits.reason is found.why else why._replace(reason=_encode(waits.reason))

    def _claim(self, claim: Claim) -> bytes:
        known = self._claims.get(claim)
        if known is None:
            known = _encode(self._views.claim(claim))
            if len(self._claims) >= _MOST_KEPT:
                self._claims.clear()
            if not claim.named:  # the labels of GPUs may change
                self._claims[claim] = known
        return known


def _has_never_run(job: Job) -> bool:
    return job.state is State.QUEUED and _what_runs_change(job) == _NEVER_RUN


def _number(value: int | None) -> bytes:
    return _NULL if value is None else b"%d" % value


_instant = lru_cache(maxsize=4096)(lambda at: _encode(instant(at)))
"""An instant as JSON: the elements of an array share theirs."""
