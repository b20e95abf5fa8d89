"""Publishes the GPUs of this node through Slurm, and the faults among them.

The summary is in the node's Extra, where any node reads it. Slurm cannot be told that a single GPU
is out of service: its counts change only with slurm.conf. So faults are in the node's Comment, and
the daemon refuses jobs that Slurm sends to such a GPU. When all GPUs are out, the node is drained.
Reason is not shown for a node that is not drained (Slurm 22.05).

The daemon changes only what begins with "gpulease:", not what an admin has written there.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta

from gpulease.domain.gpu import JobId
from gpulease.domain.job import CommandFingerprint
from gpulease.domain.lease import State
from gpulease.domain.memory_estimate import MOST_RUNS, size_for
from gpulease.errors import RecordUnwritable, SlurmFailed
from gpulease.record import replace
from gpulease.service.job_list import JobQuery
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import Clock, InThread, Store
from gpulease.slurm.annotations import MOST, OURS, NodeSummary, encode, learnt_keys
from gpulease.slurm.node.controller import RunSlurm, run_slurm
from gpulease.slurm.records import parse_records

_log = logging.getLogger(__name__)

_OUT = frozenset({"drained", "unreadable", "lost", "prohibited"})
"""The states of a GPU that takes no leases."""
_AT_LEAST_EVERY = 4
"""Periods after which the summary is published even if it has not changed."""
_LONGEST = 200
_REMEMBERED = timedelta(days=10)
_MOST_READ = 1000
_Known = tuple[int, CommandFingerprint]
"""A user and a command."""


class PublicationPace:
    """When to publish: once in a period, and at the next look after leases have changed."""

    def __init__(self) -> None:
        self._held: frozenset[int] = frozenset()
        self._looks = 0
        """Since the last publication."""

    def is_due(self, held: frozenset[int], looks_in_period: int) -> bool:
        """Return whether to publish at this look, when the jobs `held` have leases."""
        self._looks += 1
        if self._looks < looks_in_period and self._held == held:
            return False
        self._held, self._looks = held, 0
        return True


class SlurmPublication:
    """Publishes when something has changed, and now and then; called as `PublicationPace` says."""

    def __init__(
        self,
        summary: Callable[[], NodeSummary | None],
        node: Callable[[], str | None],
        run: RunSlurm = run_slurm,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`summary` is None before the first observation, `node` without Slurm."""
        self._summary = summary
        self._node = node
        self._run = run
        self._now = now
        self._published: NodeSummary | None = None
        self._periods = 0
        """Since the last publication."""
        self._faults: str | None = None
        """As last reported; None if that is not known."""
        self.failure: str | None = None
        """Why the last publication failed, for `doctor`."""
        self._complaints = LogOnce(_log)

    async def publish(self) -> None:
        """Publish what has changed."""
        node, summary = self._node(), self._summary()
        if node is None or summary is None:
            return
        try:
            await self._publish(node, summary)
            await self._report(node, summary)
        except SlurmFailed as error:
            # It may have lost what it knew.
            self._published = self._faults = None
            self.failure = error.message
            text = f"cannot publish the GPUs of this node through Slurm: {error}"
            self._complaints.say("publish", text, why=error.message)
        else:
            self.failure = None
            if self._complaints.passed("publish"):
                _log.info("the GPUs of this node are published through Slurm again")

    async def _publish(self, node: str, summary: NodeSummary) -> None:
        self._periods += 1
        if summary == self._published and self._periods < _AT_LEAST_EVERY:
            return
        text = encode(replace(summary, at=round(self._now(), 1)))
        await self._run("scontrol", "update", f"nodename={node}", f"extra={text}")
        self._published, self._periods = summary, 0

    async def _report(self, node: str, summary: NodeSummary) -> None:
        """Report GPUs that are out of service, and those that are back."""
        gpus = [gpu for gpu in summary.gpus if not gpu.local]
        out = [f"GPU {gpu.index}: {gpu.detail or gpu.state}" for gpu in gpus if gpu.state in _OUT]
        faults = "; ".join(out)[:_LONGEST]
        all_out = bool(gpus) and len(out) == len(gpus)
        if faults == self._faults:
            return
        shown = parse_records(await self._run("scontrol", "--oneliner", "show", "node", node))[0]
        changes = _drain(shown, faults, all_out=all_out)
        comment, wanted = shown.get("Comment", ""), f"{OURS}{faults}" if faults else ""
        if comment != wanted and (not comment or comment.startswith(OURS)):
            changes.insert(0, f"comment={wanted}")
        if changes:
            await self._run("scontrol", "update", f"nodename={node}", *changes)
            _log.info("reported to Slurm: %s", faults or "all GPUs are in service again")
        self._faults = faults


def _drain(shown: Mapping[str, str], faults: str, *, all_out: bool) -> list[str]:
    """Return the change of the node's state, if it is undrained or drained by gpulease."""
    is_drained = "DRAIN" in shown.get("State", "")
    is_ours = shown.get("Reason", "").startswith(OURS)
    if all_out and not is_drained:
        return ["state=drain", f"reason={OURS}{faults}"]
    if not all_out and is_drained and is_ours:
        return ["state=undrain"]
    return []


class LearntSizes:
    """The sizes of the latest commands."""

    def __init__(
        self,
        store: Store,
        in_writer: InThread,
        clock: Clock,
    ) -> None:
        self._store = store
        self._in_writer = in_writer
        self._clock = clock
        self._latest: dict[_Known, None] | None = None
        """The latest last; None before the database was read."""
        self._held: frozenset[JobId] = frozenset()
        self.sizes: dict[str, int] = {}
        """Bytes, by `learnt_key`."""
        self.used: dict[str, int] = {}
        """Bytes that the latest jobs of Slurm needed, by number."""

    async def update(self) -> None:
        """Learn from the jobs that have ended since the last call."""
        held = frozenset(job.id for job in self._store.holding())
        before, self._held = self._held, held
        if self._latest is None:
            self._latest = {}
            since = self._clock.now() - _REMEMBERED
            past = self._store.past_jobs(since)
            with suppress(RecordUnwritable):  # as for `past_jobs`
                query = JobQuery(state=State.ENDED, newest=True, since=since, limit=_MOST_READ)
                for past_job in reversed(self._store.ended_jobs(query).jobs):
                    self._note_used(past_job.slurm_job, past_job.used)
            self._add((each.owner.uid, each.fingerprint) for each in past)
        elif before <= held:
            return
        else:
            ended = [*filter(None, map(self._store.job, sorted(before - held)))]
            for job in ended:
                used = [lease.used for lease in job.leases if lease.used]
                number = None if job.slurm is None else job.slurm.id
                self._note_used(number, max(used, default=None))
            self._add((job.owner.uid, job.usage.fingerprint) for job in ended)
        latest = list(self._latest)
        self.sizes = await self._in_writer(lambda: self._compute(latest))

    def _add(self, runs: Iterable[tuple[int, CommandFingerprint | None]]) -> None:
        assert self._latest is not None, "the database was read"
        for uid, fingerprint in runs:
            if fingerprint is not None:
                self._latest.pop((uid, fingerprint), None)
                self._latest[uid, fingerprint] = None
        for old in list(self._latest)[: -MOST // 2]:
            del self._latest[old]

    def _note_used(self, number: int | None, most: int | None) -> None:
        if number is not None and most is not None:
            self.used.pop(str(number), None)
            self.used[str(number)] = most
        for old in list(self.used)[:-MOST]:
            del self.used[old]

    def _compute(self, latest: Iterable[_Known]) -> dict[str, int]:
        sizes = {}
        with self._store.write() as tx:
            for uid, fingerprint in latest:
                similar = CommandFingerprint(fingerprint.similar_key, "")
                keys = learnt_keys(uid, fingerprint)
                for key, command in zip(keys, (fingerprint, similar), strict=True):
                    size = size_for(tx.past_runs(uid, command, 1, MOST_RUNS))
                    if size is not None:
                        sizes[key] = size
        return sizes
