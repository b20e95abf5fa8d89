"""Reads what a job has on a node from `scontrol show job -d`, which users can try to forge.

They choose some of the values, the name of the job for example, and these may contain line breaks.
So a line counts only if it is the only one of its kind: a forged one is always one too many.
"""

import re

from gpulease.record import record
from gpulease.slurm.records import is_batch, with_indexes
from gpulease.units import numbers_in

_ON_NODES = re.compile(r"^ +Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(.*)$", re.MULTILINE)
_BATCH = re.compile(r"^ +Requeue=[01] Restarts=[0-9]+ BatchFlag=([0-9]+) ", re.MULTILINE)
_STATE = re.compile(r"^   JobState=(\w+) Reason=", re.MULTILINE)
_OVER = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED",
                   "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED",
                   "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "REVOKED", "SPECIAL_EXIT",
                   "TIMEOUT"})  # fmt: skip
"""The states of a job whose run is over: it may be in its prolog, or wait for its next run."""
_NAME = re.compile(r"^JobId=.*? JobName=(.*)$", re.MULTILINE)
_ELEMENT = re.compile(
    r"^JobId=([0-9]+) (?:ArrayJobId=([0-9]+) ArrayTaskId=([0-9]+)"
    r"|HetJobId=([0-9]+) HetJobOffset=([0-9]+)) ",
    re.MULTILINE,
)
_RECORD = re.compile(r"^JobId=", re.MULTILINE)
_GRES = re.compile(r"(gpu|shard)(?::[^:(,]+)?:([0-9]+)\((?:IDX:)?([0-9,-]*)(?:\([^)]*\))?\)")
_SOME = re.compile(r"(?:gpu|shard)(?::[^:(,]+)?:[1-9]")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|[^\[\]]+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


@record(frozen=True)
class NodeAllocation:
    """What a job has on one node."""

    name: str
    is_batch: bool
    gpus: tuple[int, ...]
    """Numbers in the order of gres.conf."""
    shards: int
    """0: it has whole GPUs, or nothing."""


class SlurmRefusal(Exception):
    """A job of Slurm gets no lease on this node now; the text says why, for its owner."""

    def __init__(
        self, why: str, *, may_pass: bool = False, by_leases: bool = False, is_over: bool = False
    ) -> None:
        """`may_pass`: memory is in use that a job may have freed a moment ago.

        `by_leases`: leases of other jobs are in the way, which end by themselves.
        `is_over`: the job does not run any more, so there is nothing to send elsewhere.
        """
        super().__init__(why)
        self.may_pass = may_pass
        self.by_leases = by_leases
        self.is_over = is_over


def element_of(text: str, job: int) -> str | None:
    """Return the other name of a job whose number shows several jobs; None if there is none.

    It is 17_3 for an element of an array, and 17+1 for a component of a heterogeneous job.
    """
    found = _ELEMENT.findall(text) if len(_RECORD.findall(text)) > 1 else []
    names = [
        f"{array}_{index}" if array else f"{leader}+{offset}"
        for number, array, index, leader, offset in found
        if number == str(job)
    ]
    return names[0] if len(names) == 1 else None


def allocation_on(text: str, job: int, node: str) -> NodeAllocation:
    """Return what the only job in `text` has on `node`.

    Raises:
        SlurmRefusal: it does not run any more (Slurm then shows a GRES= without GPUs), there is no
            such job on the node, or what `text` says is ambiguous.
    """
    states = _STATE.findall(text)
    if len(states) > 1:
        raise _ambiguous(job)
    if states and states[0] in _OVER:
        raise SlurmRefusal(f"job {job} does not run any more: it is {states[0]}", is_over=True)
    there = [gres for nodes, gres in _ON_NODES.findall(text) if includes(nodes, node)]
    batch, name = _BATCH.findall(text), _NAME.search(text)
    if not there or not batch or name is None:
        raise SlurmRefusal(f"Slurm says that job {job} has nothing on node {node}")
    if len(there) > 1 or len(batch) > 1:
        raise _ambiguous(job)
    gpus, shards = gres_in(there[0])
    if not gpus and _SOME.search(there[0]):
        raise SlurmRefusal(f"cannot read on which GPUs Slurm has placed job {job}: GRES={there[0]}")
    return NodeAllocation(name[1], is_batch(batch[0]), gpus, shards)


def gres_in(text: str) -> tuple[tuple[int, ...], int]:
    """Return the GPUs and shards of a job in a text such as "gpu:2(IDX:0-1)"."""
    gpus: set[int] = set()
    shards = 0
    for kind, count, places in _GRES.findall(with_indexes(text)):
        gpus.update(numbers_in(places))
        shards += int(count) if kind == "shard" else 0
    return tuple(sorted(gpus)), shards


def _ambiguous(job: int) -> SlurmRefusal:
    return SlurmRefusal(
        f"it is not clear what Slurm job {job} has: its name or comment looks like a part of "
        "Slurm's answer"
    )


def includes(hostlist: str, node: str) -> bool:
    """Return whether a list of nodes, such as "n[1-3,07],login", names a node.

    The list is not expanded: it may be huge.
    """
    return any(_matches(item, node) for item in _ITEM.findall(hostlist))


def _matches(item: str, node: str) -> bool:
    parts = list(_PART.finditer(item))
    pattern = "".join(
        r"([0-9]{1,18})" if part[1] is not None else re.escape(part[0]) for part in parts
    )
    found = re.fullmatch(pattern, node)
    if found is None:
        return False
    ranges = (part[1] for part in parts if part[1] is not None)
    return all(
        _in_ranges(number, each) for number, each in zip(found.groups(), ranges, strict=True)
    )


def _in_ranges(number: str, ranges: str) -> bool:
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if found is None:
            continue
        first, last = found[1], found[2] or found[1]
        # Numbers with leading zeros have the width of the first one.
        width = len(first) if first.startswith("0") else 1
        if int(first) <= int(number) <= int(last) and number == f"{int(number):0{width}d}":
            return True
    return False
