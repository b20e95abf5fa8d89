"""The size of a lease that nobody named: by what the same user's same script used before."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from gpulease.domain.memory import GpuMemory
from gpulease.domain.plan import ledgers
from gpulease.domain.shape import script_name
from gpulease.domain.sizing import MOST_RUNS, Run, deciding, size_for
from gpulease.service.look import Look, Policy, snapshot
from gpulease.service.ports import Order, Transaction
from gpulease.units import format_size


def sized(order: Order, tx: Transaction, gpus: Sequence[GpuMemory], policy: Policy) -> Order:
    """Return `order` with the size that its likes needed, if it named none and there are any.

    Never more than `gpus` offer when they are empty, and never less than the smallest lease.
    """
    shape = order.account.shape
    if not order.sizes_itself or shape is None:
        return order
    runs = tx.runs(order.owner.uid, shape, order.claim.gpus, MOST_RUNS)
    wanted = size_for(runs)
    if wanted is None:
        return order
    memory = max(policy.smallest_lease, min(wanted, largest(gpus, order.claim.gpus) or wanted))
    return replace(
        order,
        claim=replace(order.claim, memory=memory),
        account=replace(order.account, sized=_because(order, runs, memory)),
    )


def largest(gpus: Sequence[GpuMemory], count: int) -> int:
    """Return the bytes that can at most be leased on each of `count` GPUs at once; 0: none."""
    offered = sorted((gpu.allocatable or 0 for gpu in gpus), reverse=True)
    return offered[count - 1] if count <= len(offered) else 0


def most_of(seen: Look | None, policy: Policy, count: int, at: datetime) -> int:
    """Return the bytes that a job of `count` GPUs could have on each if nothing else ran."""
    if seen is None:
        return 0
    return largest(ledgers(snapshot((), seen, policy, {}, at)), count)


def _because(order: Order, runs: Sequence[Run], memory: int) -> str:
    size = format_size(memory)
    script = script_name(order.invocation.argv, order.invocation.cwd) or order.name
    run = deciding(runs)
    assert run is not None, "something was sized by these runs"
    lease, used = format_size(run.leased), format_size(run.used)
    if run.out_of_memory:
        return f"{size}, since {script} ran out of memory in {lease}"
    if run.fell_short:
        return f"{size}, since {script} was stopped for holding {used} in a lease of {lease}"
    return f"{size}, since {script} used up to {used} in {_count(runs, run)}"


def _count(runs: Sequence[Run], run: Run) -> str:
    """Say how many runs used no more than `run`."""
    within = sum(each.used <= run.used for each in runs)
    if within < len(runs):
        return f"{within} of {len(runs)} runs"
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"
