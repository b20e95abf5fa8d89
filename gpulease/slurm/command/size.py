"""What a job on the cluster asks for: shards of one GPU, or whole GPUs.

Slurm accepts what no GPU can hold, and lets it wait: it is refused here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from gpulease.errors import BadValue, CannotLease
from gpulease.fingerprint import fingerprint_of, script_name
from gpulease.options import RunOptions, option_of
from gpulease.record import record
from gpulease.slurm.node_summary import ClusterNode, NodeSummary, learnt_size
from gpulease.slurm.shards import DEFAULT_SHARD, gres_of_node, shards_for, shards_of_gpu
from gpulease.units import MIB, Share, format_above, format_size, parse_memory
from gpulease.wire.ranges import check_submission
from gpulease.wire.text import from_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.wire.requests import SubmitRequest

_WHOLE = "for whole GPUs: --gpus {count} --exclusive"


@record(frozen=True)
class Size:
    """What to ask Slurm for."""

    gres: str
    """The value of --gres."""
    text: str
    """For people: 4G, or 2 whole GPUs."""
    reason: str | None = None
    """Why, if the user named no size."""


def refuse_out_of_range(request: SubmitRequest) -> None:
    """Check the values that the daemon checks elsewhere.

    Raises:
        BadValue: one is out of range; the error names the option.
    """
    try:
        check_submission(request)
    except BadValue as error:
        raise (error if error.parts is None else error.called(option_of(error.parts[0]))) from None


def size_of(
    options: RunOptions, request: SubmitRequest, capacity: Capacity, default: int | Share
) -> Size:
    """Return what a job asks for; `default` is the size of jobs that name none.

    Raises:
        BadValue: Slurm cannot express it.
        CannotLease: no GPU of the cluster has as much.
    """
    count = request.claim.gpus
    if options.exclusive:
        return _whole(options, count, capacity)
    if count > 1:
        raise BadValue(
            f"cannot lease a part of each of {count} GPUs: Slurm gives parts of one GPU only",
            _WHOLE.format(count=count),
        )
    memory, reason = _memory(options, request, capacity, default)
    size = memory if isinstance(memory, int) else _share(memory, capacity)
    _refuse_larger(size, capacity)
    shards = shards_for(size, capacity.shard)
    return Size(f"shard:{shards}", format_size(shards * capacity.shard), reason)


def _whole(options: RunOptions, count: int, capacity: Capacity) -> Size:
    if count > capacity.gpus > 0:
        raise CannotLease(
            f"cannot lease {count} GPUs: no node of the cluster has more than {capacity.gpus}",
            f"ask for at most --gpus {capacity.gpus}",
        )
    memory = None if options.mem is None else parse_memory(options.mem)
    if isinstance(memory, int):
        _refuse_larger(memory, capacity)
        if capacity.sizes and memory > min(capacity.sizes) * capacity.shard:
            raise BadValue(
                f"cannot use --mem {options.mem} with --exclusive: Slurm may choose a GPU with "
                f"{format_size(min(capacity.sizes) * capacity.shard)}",
                'name the type of the GPU, as in --slurm "--gres=gpu:TYPE:1"; sinfo -o %G lists '
                "the types",
            )
    if count == 1 and capacity.whole:
        # Slurm 22.05 grants gpu:1 on a GPU with shards in use, which its node has to refuse.
        return Size(f"shard:{capacity.whole}", "a whole GPU")
    return Size(f"gpu:{count}", "a whole GPU" if count == 1 else f"{count} whole GPUs")


def _memory(
    options: RunOptions, request: SubmitRequest, capacity: Capacity, default: int | Share
) -> tuple[int | Share, str | None]:
    if options.mem is not None:
        return parse_memory(options.mem), None
    argv, cwd = [from_wire(word) for word in request.argv], from_wire(request.cwd)
    fingerprint = fingerprint_of(argv, cwd)
    found = fingerprint and learnt_size(capacity.learnt, os.geteuid(), fingerprint)
    if not found:
        return default, "the default"
    size = min(found, capacity.largest or found)
    return size, f"since {script_name(argv, cwd)} needed that before"


def _share(share: Share, capacity: Capacity) -> int:
    if len(capacity.sizes) != 1:
        sizes = " and ".join(format_size(each * capacity.shard) for each in sorted(capacity.sizes))
        raise BadValue(
            f"cannot lease {share} of a GPU: GPUs of the cluster have {sizes or 'unknown sizes'}",
            "ask for a size, such as --mem 4G",
        )
    return max(MIB, share.of(capacity.largest))


def _refuse_larger(size: int, capacity: Capacity) -> None:
    if not capacity.sizes:
        raise CannotLease(
            "cannot lease a part of a GPU: Slurm knows no shards on this cluster",
            "an admin adds them to gres.conf and slurm.conf: gpulease-setup slurm prints the "
            "lines; whole GPUs: --exclusive",
        )
    if size > capacity.largest:
        raise CannotLease(
            f"cannot lease {format_above(size, capacity.largest)}: the largest GPU of the cluster "
            f"offers {format_size(capacity.largest)}",
            f"ask for at most --mem {format_size(capacity.largest)}",
        )


@record(frozen=True)
class Capacity:
    """All nodes together, those that are down included: jobs can wait for them."""

    shard: int = DEFAULT_SHARD
    """Bytes of one shard."""
    sizes: frozenset[int] = frozenset()
    """How many shards GPUs have."""
    gpus: int = 0
    """GPUs of the node that has most."""
    learnt: Sequence[Mapping[str, int]] = ()
    whole: int | None = None
    """How many shards every GPU has, if Slurm counts as many for each of them."""

    @property
    def largest(self) -> int:
        """Bytes of the largest GPU."""
        return max(self.sizes, default=0) * self.shard


def capacity_of(nodes: Iterable[ClusterNode], shard: int | None) -> Capacity:
    """Return what nodes offer; `shard` is that of the settings here, if they have one."""
    known = [(gres_of_node(node.fields.get("Gres", "")), node.summary) for node in nodes]
    summaries = [summary for _, summary in known if summary is not None]
    size = shard or next((each.shard for each in summaries), DEFAULT_SHARD)
    sizes = frozenset(shards for node in known for shards in _sizes(*node, size) if shards)
    whole = next(iter(sizes)) if len(sizes) == 1 else None
    if any(_total(counts, "shard") != (whole or 0) * _total(counts, "gpu") for counts, _ in known):
        whole = None
    return Capacity(
        shard=size,
        sizes=sizes,
        whole=whole,
        gpus=max((_total(counts, "gpu") for counts, _ in known), default=0),
        learnt=[each.learnt for each in summaries if each.learnt],
    )


_Counts = Mapping[tuple[str, str], int]


def _total(counts: _Counts, name: str) -> int:
    return sum(count for (each, _), count in counts.items() if each == name)


def _sizes(counts: _Counts, summary: NodeSummary | None, shard: int) -> list[int]:
    """Return the shards of each kind of GPU on a node.

    Slurm divides the shards of a node evenly over its GPUs if they are of one type, or if each type
    has shards; otherwise the node itself knows, and without it only the sum is known.
    """
    gpus = {kind: count for (name, kind), count in counts.items() if name == "gpu"}
    shards = _total(counts, "shard")
    if not gpus or not shards:
        return []
    if len(gpus) == 1:
        return [shards // _total(counts, "gpu")]
    if summary is None:
        return [shards]
    return [
        shards_of_gpu(gpu.allocatable, shard)
        for gpu in summary.gpus
        if gpu.allocatable is not None and not gpu.local
    ]
