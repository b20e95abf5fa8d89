"""The GPUs that a claim asks for, on this machine: found by name, or refused at once."""

from collections.abc import Collection, Iterable, Sequence

from gpulease.domain.choice import sets_of, suits
from gpulease.domain.gpu import GpuMemory, GpuReading, GpuUuid
from gpulease.domain.lease import Claim
from gpulease.domain.placement import can_be_combined
from gpulease.errors import CannotLease
from gpulease.service.health import named
from gpulease.units import format_size

_MOST_LISTED = 16


def uuids_of(names: Iterable[str], gpus: Sequence[GpuReading]) -> tuple[GpuUuid, ...]:
    """Return the GPUs with these names, by index, each once.

    Raises:
        NoSuchGpu: a name stands for no GPU, or for several.
    """
    found = {named(name, gpus).uuid for name in names}
    return tuple(gpu.uuid for gpu in gpus if gpu.uuid in found)


def refuse_too_few_named(claim: Claim) -> None:
    """Check that a claim names enough GPUs.

    Raises:
        CannotLease: it asks for more.
    """
    if claim.named and claim.gpus > len(claim.named):
        raise CannotLease(
            f"cannot lease {claim.gpus} GPUs: --gpu names {len(claim.named)}",
            "name at least as many with --gpu as --gpus asks for",
        )


def suited_sets(claim: Claim, gpus: Iterable[GpuMemory]) -> Collection[Sequence[GpuMemory]]:
    """Return the sets of GPUs that a claim could have together, whatever is free on them."""
    able = (
        gpu
        for gpu in gpus
        if not gpu.reading.mig_mode and can_be_combined(claim, gpu) and suits(claim, gpu.reading)
    )
    return sets_of(claim, able, lambda gpu: gpu.reading).values()


def refuse_choice(claim: Claim, gpus: Sequence[GpuMemory]) -> None:
    """Check that there are enough of the GPUs that a claim asks for.

    Raises:
        CannotLease: there are not.
    """
    if claim.choice is None:
        return
    found = max(map(len, suited_sets(claim, gpus)), default=0)
    if found >= claim.gpus:
        return
    readings = [gpu.reading for gpu in gpus[:_MOST_LISTED]]
    here = ", ".join(f"{gpu.label} ({gpu.name}, {_total(gpu)})" for gpu in readings)
    count = "a GPU" if claim.gpus == 1 else f"{claim.gpus} GPUs"
    wanted = f"{count} {_wishes(claim, gpus)}"
    raise CannotLease(
        f"cannot lease {wanted}: this machine has {found or 'none'}",
        f"the GPUs here: {here}{', ...' if len(gpus) > _MOST_LISTED else ''}",
    )


def _total(gpu: GpuReading) -> str:
    return "size unknown" if gpu.total is None else format_size(gpu.total)


def _wishes(claim: Claim, gpus: Sequence[GpuMemory]) -> str:
    """Return what a claim asks of its GPUs, as options."""
    labels = [gpu.reading.label for gpu in gpus if gpu.uuid in claim.named]
    given = (
        (bool(claim.named), f"--gpu {','.join(labels)}"),
        (claim.model is not None, f"--gpu-model {claim.model}"),
        (claim.min_vram is not None, f"--min-vram {format_size(claim.min_vram or 0)}"),
        (claim.same_model, "--same-model"),
    )
    return "with " + " ".join(option for is_given, option in given if is_given)
