"""`gpulease.lease`: GPU memory for the process that calls, and nobody else's meanwhile."""

import os
import threading

from gpulease import config
from gpulease.client import Client
from gpulease.errors import AlreadyClaimed, AlreadyLeased
from gpulease.leasing.around import InForce, in_force, lease_around, lease_variables
from gpulease.leasing.claimed import CUDA, claimed_by
from gpulease.leasing.force import put_into_force, variables
from gpulease.leasing.held import Lease, LeasedGpu
from gpulease.leasing.reach import reach
from gpulease.leasing.request import Span, Visible, claim_of, hold_request
from gpulease.leasing.waiting import granted
from gpulease.wire import HoldRequest, NestedView

_taking = threading.Lock()
"""Held by the thread that waits for this process's lease."""
_held: Lease | None = None
"""This process's lease; kept here, so that it lasts though nobody keeps the object."""


def lease(  # noqa: PLR0913  each is a word of the public API
    memory: str | int | None = None,
    *,
    gpus: int = 1,
    exclusive: bool = False,
    time_limit: Span | None = None,
    name: str | None = None,
    wait: Span | None = None,
    visible: Visible = "uuid",
    growth: bool = False,
    split: int = 1,
    client: Client | None = None,
) -> Lease:
    """Lease GPU memory for this process, and hold its framework to it. Waits in the queue.

    Call it before the first use of a GPU; importing a framework is no use. `memory` is on each
    GPU: "4G", "40%", a number of bytes, or None for the daemon's default. `time_limit` and `wait`
    are seconds, "30m", or a timedelta; `wait=0` does not wait at all, None as long as it takes.
    `visible`, `growth` and `split` are the options of `gpulease run`. Without a `client` the
    daemon is found as the command finds it, or one is started.

    Inside a job, or a shell that holds a lease, nothing is queued: what is returned is the lease
    that is there. Releasing it does not end the job.

    Raises:
        AlreadyClaimed: a framework of this process uses the GPU already.
        AlreadyLeased: this process holds a lease, or runs under one that is too small.
        NoRoomNow: it was not granted within `wait`.
        CannotLease: this machine could never grant it.
        NoDaemon: no daemon answers, and none can be started.
        BadValue: an argument cannot be read.
    """
    if not _taking.acquire(blocking=False):
        raise AlreadyLeased(
            "cannot lease: another thread of this process is waiting for a lease",
            "a process has one lease: take it before the threads start",
        )
    try:
        _refuse_a_second()
        if in_force() is None:
            _refuse_if_claimed()
        request = hold_request(
            claim_of(memory, gpus, exclusive, time_limit),
            config.environment(),
            name=name,
            wait=wait,
            visible=visible,
            growth=growth,
            split=split,
        )
        daemon = client or reach()
        if (around := lease_around(daemon, request)) is not None:
            return _share(daemon, around, split)
        _refuse_if_claimed()
        return _take(daemon, request)
    finally:
        _taking.release()


def _take(client: Client, request: HoldRequest) -> Lease:
    global _held
    with granted(client, request) as (job, view):
        # The wait may have been long, and other threads busy.
        _refuse_if_claimed()
        lift = put_into_force(view)
    gpus = [LeasedGpu(leased.gpu, leased.memory) for leased in job.leases]
    _held = Lease(client, job.id, gpus, variables(view), lift, _forget)
    return _held


def _share(client: Client, around: NestedView, split: int) -> Lease:
    """Return the lease of the job that this process belongs to."""
    global _held
    job, view = around.job, around.environment
    assert job is not None and view is not None, "the daemon sends both or none"
    if (here := in_force()) is not None and here.job == str(job.id):
        _refuse_another_split(here, split)
        gpus, lift = here.gpus, _keep_the_hooks
    else:
        # The environment was cleared between the job and this process.
        _refuse_if_claimed()
        lift = put_into_force(view)
        gpus = tuple(LeasedGpu(gpu, around.memory or 0) for gpu in around.gpus)
    _held = Lease(client, job.id, gpus, lease_variables(), lift, _forget, shared=True)
    return _held


def _keep_the_hooks() -> None:
    """Lift nothing: the hooks have been in force since this interpreter started."""


def _forget() -> None:
    global _held
    _held = None


def _refuse_a_second() -> None:
    mine = _held if _held is not None and _held.pid == os.getpid() else None
    if mine is not None and not mine.held:
        # Cancelled, or at its time limit: what it set in this process is still there.
        _refuse_if_claimed()
        mine.release()
    elif mine is not None:
        raise AlreadyLeased(
            f"cannot lease: this process holds a lease already, job {mine.id}",
            "one lease is for a whole process: ask for all of it at once, or release it first; "
            "one that a framework has used lasts until the process ends, in a notebook until the "
            "kernel is restarted",
        )


def _refuse_another_split(here: InForce, split: int) -> None:
    if split not in (1, here.split):
        raise AlreadyLeased(
            f"cannot lease: job {here.job} shows each GPU as {here.split}, not as {split}",
            f"start the job with --split {split}, or leave split= out",
        )


def _refuse_if_claimed() -> None:
    framework = claimed_by()
    if framework == CUDA:
        raise AlreadyClaimed(
            "cannot lease: CUDA has started in this process, and the GPUs that it sees are settled",
            "lease before anything looks for GPUs, were it torch.cuda.is_available(); "
            "in a notebook, restart the kernel first",
        )
    if framework is not None:
        raise AlreadyClaimed(
            f"cannot lease: {framework} has set up its devices in this process already",
            f"lease before {framework} is first used (importing it does no harm); "
            "in a notebook, restart the kernel first",
        )
