"""What gpulease writes into Slurm's fields: JSON with nodes, and with jobs.

The field Extra of a node has its summary, which its daemon publishes and any node reads
(`scontrol update nodename=n1 extra=...`). It contains no space, since scontrol prints fields
separated by spaces. It also has the sizes that the node would give to jobs without --mem, so that
the command on any node can size the next run. Their keys are digests: everybody can read it.

The AdminComment of a job has a note for people, for the command, and for other daemons, such as
`gpulease: {"why":"n1: it held 3G of GPU 0","stopped":"over_lease"}`. Only admins and nodes write
this field; what admins wrote stays in front. What is no JSON, as the notes of earlier versions, is
shown as it is.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, get_args

from gpulease.fingerprint import CommandFingerprint
from gpulease.record import record
from gpulease.slurm.commands import run_slurm
from gpulease.slurm.records import DEFAULT_SHARD, parse_record
from gpulease.units import counted

OURS: Final = "gpulease: "
"""The begin of all that gpulease writes in Slurm's fields."""
MOST_ROUNDS: Final = 3
"""The rounds of refusals after which a job is held."""

VERSION = 1
MOST = 100
"""Sizes that a node publishes, the newest."""
_DIGITS = 16
_LARGEST: Final = 1 << 53
"""Beyond all sizes."""
_LATEST: Final = 1 << 36
"""Seconds since the epoch that a date can express."""
_REASON = re.compile(r" Reason=(.*?) \[[^@\[\]]+@[0-9T:-]+\]")
"""It may contain what looks like another field."""


@record(frozen=True)
class GpuSummary:
    """One GPU of a node. Sizes are bytes; null is unknown."""

    index: int
    uuid: str
    name: str
    state: str
    """available, drained, unreadable or lost, as in `status`."""
    total: int | None = None
    allocatable: int | None = None
    leased: int | None = None
    used: int | None = None
    unmanaged: int | None = None
    local: bool = False
    """It belongs to the local queue, and Slurm does not know it."""
    detail: str | None = None
    """Why it takes no leases."""


@record(frozen=True)
class NodeSummary:
    """The GPUs of a node at one moment."""

    at: float
    """Seconds since the epoch, on the node's clock."""
    shard: int
    """Bytes of one shard."""
    gpus: tuple[GpuSummary, ...]
    version: str = ""
    """Of gpulease."""
    publish_every: float = 15.0
    """Seconds after which the next one is due, if anything has changed or not."""
    learnt: Mapping[str, int] = MappingProxyType({})
    """Bytes that jobs needed at their peak, by the digest of user and command."""
    used: Mapping[str, int] = MappingProxyType({})
    """Bytes that jobs of Slurm used at most on a GPU so far, by number: Slurm does not let anybody
    write to a job that has ended."""


@record(frozen=True)
class ClusterNode:
    """A node as Slurm shows it."""

    fields: Mapping[str, str]
    summary: NodeSummary | None
    """What gpulease published there."""


def read_nodes() -> Sequence[ClusterNode]:
    """Return all nodes.

    Raises:
        SlurmFailed: Slurm does not answer.
    """
    return nodes_in(run_slurm(["scontrol", "show", "node", "--oneliner"]))


def shard_size(nodes: Iterable[ClusterNode]) -> int:
    """Return the bytes of one shard, as nodes publish it."""
    published = (node.summary.shard for node in nodes if node.summary is not None)
    return next(published, DEFAULT_SHARD)


def nodes_in(shown: str) -> Sequence[ClusterNode]:
    """Return the nodes in the output of `scontrol --oneliner show node`."""
    nodes = []
    for line in filter(str.strip, shown.split("\n")):
        reason = _REASON.search(line)
        fields = {**parse_record(line), **({"Reason": reason[1]} if reason else {})}
        nodes.append(ClusterNode(fields, decode(fields.get("Extra"))))
    return nodes


def encode(summary: NodeSummary) -> str:
    """Return a summary as text without spaces."""
    gpus = [vars(gpu) for gpu in summary.gpus]
    fields = {"v": VERSION, **vars(summary), "gpus": gpus}
    fields |= {"learnt": dict(summary.learnt), "used": dict(summary.used)}
    text = json.dumps(fields, separators=(",", ":"))
    return text.replace(" ", "\\u0020")


def decode(text: str | None) -> NodeSummary | None:
    """Return the summary in the field Extra of a node; None if gpulease did not write it.

    Fields that this version does not know are ignored. Admins can write anything there.
    """
    try:
        read: dict[str, Any] = json.loads(text or "")
        gpus = tuple(GpuSummary(**known_fields(GpuSummary, each)) for each in read.pop("gpus"))
        learnt, used = read.pop("learnt", {}), read.pop("used", {})
        _check_sizes(learnt)
        _check_sizes(used)
        summary = NodeSummary(
            **known_fields(NodeSummary, read), gpus=gpus, learnt=learnt, used=used
        )
        return summary if summary.shard > 0 and summary.at < _LATEST else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def known_fields(kind: type, read: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of a JSON object that a class has.

    Raises:
        TypeError: a value does not fit, or this is no object.
        ValueError: a value is out of range.
    """
    found = {}
    for name, each in kind.__annotations__.items():
        if name in read:
            _check(read[name], get_args(each) or (each,))
            found[name] = read[name]
    return found


def _check(value: object, kinds: tuple[type, ...]) -> None:
    # int and bool are different here, unlike in Python.
    if type(value) not in ((*kinds, int) if float in kinds else kinds):
        raise TypeError(f"{value!r} is none of {kinds}")
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair cannot be printed
    elif isinstance(value, int | float) and not 0 <= value < _LARGEST:
        raise ValueError(value)


def _check_sizes(value: object) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    for size in value.values():
        _check(size, (int,))


def learnt_key(uid: int, key: str) -> str:
    """Return the key of a user's command; `key` is one of the two of its fingerprint."""
    from hashlib import sha256  # commands with a size start faster without it

    return sha256(f"{uid}:{key}".encode()).hexdigest()[:_DIGITS]


def learnt_keys(uid: int, fingerprint: CommandFingerprint) -> tuple[str, str]:
    """Return the keys to look up, in order: that of the same command, and that of similar ones."""
    return learnt_key(uid, fingerprint.exact_key), learnt_key(uid, fingerprint.similar_key)


def learnt_size(
    summaries: Iterable[Mapping[str, int]], uid: int, fingerprint: CommandFingerprint
) -> int | None:
    """Return the bytes that a command needed before, by the sizes of all nodes; None if unknown.

    Nodes may have seen different runs: the largest size counts.
    """
    known = list(summaries)
    for key in learnt_keys(uid, fingerprint):
        if found := [each[key] for each in known if key in each]:
            return max(found)
    return None


@record(frozen=True)
class Note:
    """Why a job was refused, or stopped."""

    why: str = ""
    """For its owner: the node, and the reason."""
    stopped: str = ""
    """Why a daemon had Slurm stop it: a word such as over_lease, idle or cancelled."""
    refused: int = 0
    """How often nodes refused it."""
    nodes: str = ""
    """Those that refused it in this round, separated by spaces; the latest last."""
    rounds: int = 0
    """How often all of its nodes refused it."""
    for_leases: bool = False
    """In this round, leases were in the way on one of them."""

    @property
    def refused_by(self) -> Sequence[str]:
        """The nodes that refused it in this round."""
        return self.nodes.split()

    def __str__(self) -> str:
        if self.stopped:
            return f"stopped ({self.stopped}): {self.why}"
        if not self.refused:
            return self.why
        leases = "; waits for leases" if self.for_leases else ""
        rounds = f"; by all nodes {self.rounds} of {MOST_ROUNDS} times" if self.rounds else ""
        return f"refused {counted(self.refused, 'time')} ({self.nodes}{leases}{rounds}): {self.why}"


def note_in(comment: str) -> Note | None:
    """Return what gpulease wrote into a job's AdminComment; None if nothing."""
    text = comment.partition(OURS)[2]
    try:
        return Note(**known_fields(Note, json.loads(text)))
    except (ValueError, TypeError, RecursionError):
        return Note(text) if text else None


def with_note(comment: str, note: Note) -> str:
    """Return a job's AdminComment with a note, and with what admins wrote before."""
    kept = "" if comment.strip() == "(null)" else comment.partition(OURS)[0]
    fields = {name: value for name, value in vars(note).items() if value}
    return f"{kept}{OURS}{json.dumps(fields, separators=(',', ':'), ensure_ascii=False)}"
