"""What a job on the cluster asks for: shards of one GPU, or whole GPUs.

Slurm accepts what no GPU can hold, and lets it wait: it is refused here.
"""

from __future__ import annotations

import os

from gpulease.cli.request import RunOptions
from gpulease.errors import BadValue, CannotLease
from gpulease.fingerprint import fingerprint_of, script_name
from gpulease.record import record
from gpulease.slurm.command.capacity import Capacity
from gpulease.slurm.node_summary import learnt_size
from gpulease.slurm.shards import shards_for
from gpulease.units import MIB, Share, format_above, format_size, parse_memory
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
