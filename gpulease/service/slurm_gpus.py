"""The GPUs that Slurm assigns, and those that are left to the daemon's own queue."""

from collections.abc import Mapping, Sequence

from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.errors import NotAllowed
from gpulease.service.ports import SlurmPolicy

_KEPT = "Slurm assigns it"


def gpus_of_slurm(readings: Sequence[GpuReading], slurm: SlurmPolicy) -> tuple[GpuReading, ...]:
    """Return the GPUs that Slurm assigns, in the order in which gres.conf lists their nodes.

    Slurm numbers the GPUs of a node by their place in this list. The file names are those of the
    minor numbers; simulated GPUs have none, and count by index.
    """
    local = local_gpus(readings, slurm)
    known = (each for each in readings if each.parent is None and each.uuid not in local)
    return tuple(sorted(known, key=device_number))


def device_number(gpu: GpuReading) -> int:
    """Return the number in the name of a GPU's device file."""
    return gpu.index if gpu.minor is None else gpu.minor


def local_gpus(readings: Sequence[GpuReading], slurm: SlurmPolicy) -> frozenset[GpuUuid]:
    """Return the GPUs of the daemon's own queue, those in MIG mode with their MIG devices."""
    names = {name.lower() for name in slurm.local_gpus}
    whole = (each for each in readings if each.parent is None)
    named = {each.uuid for each in whole if names & {each.label, each.uuid.lower()}}
    return frozenset(each.uuid for each in readings if {each.uuid, each.parent} & named)


def missing_local_gpus(readings: Sequence[GpuReading], slurm: SlurmPolicy) -> tuple[str, ...]:
    """Return the names in the setting `local_gpus` that are no GPU of this machine."""
    whole = [each for each in readings if each.parent is None]
    known = {name for each in whole for name in (each.label, each.uuid.lower())}
    return tuple(name for name in slurm.local_gpus if name.lower() not in known)


def kept_for_slurm(
    readings: Sequence[GpuReading], slurm: SlurmPolicy | None
) -> Mapping[GpuUuid, str]:
    """Return the GPUs that no job of the daemon's queue may use, and why.

    Without local GPUs it is closed to users, and the jobs of admins may use all of them.
    """
    if slurm is None or not slurm.local_gpus:
        return {}
    local = local_gpus(readings, slurm)
    return {each.uuid: _KEPT for each in readings if each.uuid not in local}


def refuse_closed_queue(slurm: SlurmPolicy | None, verb: str) -> None:
    """Check that the daemon's own queue takes jobs of ordinary users.

    Raises:
        NotAllowed: Slurm assigns all GPUs.
    """
    if slurm is not None and not slurm.local_gpus:
        raise NotAllowed(
            f"cannot {verb}: Slurm assigns the GPUs of this machine",
            "submit to Slurm: gpulease run --mem 4G train.py, or srun --gres=shard:16; only root "
            "and admins may use the GPUs without Slurm",
        )
