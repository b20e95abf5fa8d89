"""Reads what a job has on a node from `scontrol show job -d`, which users can try to forge.

They choose some of the values, the name of the job for example, and these may contain line breaks.
So a line counts only if it is the only one of its kind: a forged one is always one too many.
"""

import re

from gpulease.record import record
from gpulease.slurm.hostlist import includes
from gpulease.slurm.records import is_batch

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
_GRES = re.compile(r"(gpu|shard)(?::[^:(,]+)?:([0-9]+)\((?:IDX:)?([0-9,/-]*)(?:\([^)]*\))?\)")
_SOME = re.compile(r"(?:gpu|shard)(?::[^:(,]+)?:[1-9]")


@record(frozen=True)
class NodeAllocation:
    """What a job has on one node."""

    name: str
    is_batch: bool
    gpus: tuple[int, ...]
    """Numbers in the order of gres.conf."""
    shards: int
    """0: it has whole GPUs, or nothing."""


class Unclear(Exception):
    """What Slurm says about a job cannot be trusted, or does not fit; the text says why."""


class JobIsOver(Unclear):
    """The job does not run any more: it was cancelled or queued again, perhaps in its prolog."""


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
        JobIsOver: it does not run any more. Slurm then shows a GRES= without GPUs.
        Unclear: there is no such job on the node, or what `text` says is ambiguous.
    """
    states = _STATE.findall(text)
    if len(states) > 1:
        raise _ambiguous(job)
    if states and states[0] in _OVER:
        raise JobIsOver(f"job {job} does not run any more: it is {states[0]}")
    there = [gres for nodes, gres in _ON_NODES.findall(text) if includes(nodes, node)]
    batch, name = _BATCH.findall(text), _NAME.search(text)
    if not there or not batch or name is None:
        raise Unclear(f"Slurm says that job {job} has nothing on node {node}")
    if len(there) > 1 or len(batch) > 1:
        raise _ambiguous(job)
    gpus, shards = gres_in(there[0])
    if not gpus and _SOME.search(there[0]):
        raise Unclear(f"cannot read on which GPUs Slurm has placed job {job}: GRES={there[0]}")
    return NodeAllocation(name[1], is_batch(batch[0]), gpus, shards)


def gres_in(text: str) -> tuple[tuple[int, ...], int]:
    """Return the GPUs and shards of a job in a text such as "gpu:2(IDX:0-1)".

    Shards have IDX up to Slurm 23.02. Later releases show for each GPU of the node what the job has
    of how many: "shard:16(0/96,16/96)".
    """
    gpus: set[int] = set()
    shards = 0
    for kind, count, places in _GRES.findall(text):
        gpus.update(numbers_in(places))
        shards += int(count) if kind == "shard" else 0
    return tuple(sorted(gpus)), shards


def numbers_in(text: str) -> list[int]:
    """Return the numbers in a text such as "0-1,3", or those of the parts in "0/96,16/96"."""
    if "/" in text:
        used = (each.partition("/")[0] for each in text.split(","))
        return [at for at, count in enumerate(used) if count.strip("0")]
    found: list[int] = []
    for each in text.split(","):
        first, _, last = each.partition("-")
        if first.isdigit() and len(first) < 4 and len(last) < 4:
            found += range(int(first), int(last or first) + 1)
    return found


def _ambiguous(job: int) -> Unclear:
    return Unclear(
        f"it is not clear what Slurm job {job} has: its name or comment looks like a part of "
        "Slurm's answer"
    )
