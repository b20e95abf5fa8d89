"""Publishes the GPUs of this node through Slurm, and the faults among them.

The summary is in the node's Extra, where any node reads it. Slurm cannot be told that a single GPU
is out of service: its counts change only with slurm.conf. So faults are in the node's Comment, and
the daemon refuses jobs that Slurm sends to such a GPU. When all GPUs are out, the node is drained.
Reason is not shown for a node that is not drained (Slurm 22.05).

The daemon changes only what begins with "gpulease:", not what an admin has written there.
"""

import logging
import time
from collections.abc import Callable, Mapping

from gpulease.errors import SlurmFailed
from gpulease.record import replace
from gpulease.service.log_once import LogOnce
from gpulease.slurm.node.commands import RunSlurm, run_slurm
from gpulease.slurm.node_summary import GpuSummary, NodeSummary, encode
from gpulease.slurm.notes import OURS
from gpulease.slurm.records import parse_records

_log = logging.getLogger(__name__)

_OUT = frozenset({"drained", "unreadable", "lost", "prohibited"})
"""The states of a GPU that takes no leases."""
_AT_LEAST_EVERY = 4
"""Periods after which the summary is published even if it has not changed."""
_LONGEST = 200


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
        faults = "; ".join(_fault(gpu) for gpu in gpus if gpu.state in _OUT)[:_LONGEST]
        all_out = bool(gpus) and all(gpu.state in _OUT for gpu in gpus)
        if faults == self._faults:
            return
        shown = parse_records(await self._run("scontrol", "--oneliner", "show", "node", node))[0]
        changes = [*_comment(shown, faults), *_drain(shown, faults, all_out=all_out)]
        if changes:
            await self._run("scontrol", "update", f"nodename={node}", *changes)
            _log.info("reported to Slurm: %s", faults or "all GPUs are in service again")
        self._faults = faults


def _fault(gpu: GpuSummary) -> str:
    return f"GPU {gpu.index}: {gpu.detail or gpu.state}"


def _comment(shown: Mapping[str, str], faults: str) -> list[str]:
    now, wanted = shown.get("Comment", ""), f"{OURS}{faults}" if faults else ""
    is_ours = not now or now.startswith(OURS)
    return [f"comment={wanted}"] if is_ours and now != wanted else []


def _drain(shown: Mapping[str, str], faults: str, *, all_out: bool) -> list[str]:
    """Return the change of the node's state, if it is undrained or drained by gpulease."""
    is_drained = "DRAIN" in shown.get("State", "")
    is_ours = shown.get("Reason", "").startswith(OURS)
    if all_out and not is_drained:
        return ["state=drain", f"reason={OURS}{faults}"]
    if not all_out and is_drained and is_ours:
        return ["state=undrain"]
    return []
