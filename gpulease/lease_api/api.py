"""`gpulease.lease`: GPU memory for the process that calls, and nobody else's meanwhile.

A lease that this process holds, from its grant to its release.

The lease under which this process runs already: that of its job, or of the shell around it.
"""

import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from gpulease import config
from gpulease.client import Client
from gpulease.errors import (
    AlreadyClaimed,
    AlreadyLeased,
    GpuleaseError,
    LeaseKept,
    NoSuchJob,
    WrongState,
)
from gpulease.lease_api.acquire import Span, Visible, claim_of, granted, hold_request, reach
from gpulease.lease_api.activate import Lift, put_into_force, variables
from gpulease.lease_api.cuda_state import CUDA, claimed_by
from gpulease.units import format_size
from gpulease.wire.requests import HoldRequest, NestedRequest
from gpulease.wire.views import NestedView

_ABOVE_US = 4
"""Frames from a warning to the line that gave the lease back, which is two above _release."""


@dataclass(frozen=True, slots=True)
class LeasedGpu:
    """One GPU of a lease."""

    uuid: str
    memory: int
    """Bytes of it that are ours."""


class Lease:
    """GPU memory that is this process's own; made by `gpulease.lease`.

    As a context manager it is released at the end of the block. It belongs to the process that
    took it: in a forked child, releasing it does nothing.
    """

    def __init__(
        self,
        client: Client,
        job: int,
        gpus: Sequence[LeasedGpu],
        environment: Mapping[str, str],
        lift: Lift,
        when_over: Callable[[], None],
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: it is the lease of the job that this process belongs to, which keeps it."""
        self.id: int = job
        """The job that stands for this lease in `gpulease status` and `gpulease cancel`."""
        self.gpus: tuple[LeasedGpu, ...] = tuple(gpus)
        self.environment: Mapping[str, str] = MappingProxyType(dict(environment))
        """The variables of the lease, as they are in os.environ."""
        self.pid: int = os.getpid()
        """The process that took it."""
        self._client = client
        self._lift = lift
        self._when_over = when_over
        self._shared = shared
        self._over = False
        self._warned = False

    @property
    def memory(self) -> int:
        """Bytes that are ours on each GPU."""
        return min(gpu.memory for gpu in self.gpus)

    @property
    def held(self) -> bool:
        """Whether it is still there: neither given back, nor cancelled, nor past its time limit.

        The daemon is asked; where none answers, what is not given back counts as held.
        """
        if self._over:
            return False
        try:
            return self._client.job(self.id).state != "ended"
        except NoSuchJob:
            return False
        except GpuleaseError:
            return True

    def release(self) -> None:
        """Give the lease back, and put os.environ and the frameworks back as they were.

        Where a framework has begun to use the GPU, its memory is not free before this process
        ends, and so the lease stays until then; a `gpulease.errors.LeaseKept` warning says so,
        once.

        Inside a job this is the job's lease, and the job keeps it.
        """
        self._release()

    def _release(self) -> None:
        if self._over or os.getpid() != self.pid:
            return
        if self._shared:
            self._leave()
            return
        if framework := claimed_by():
            self._keep(f"{framework} holds GPU memory until this process ends, and so the lease")
            return
        try:
            # It may be over already: cancelled by someone, or at its time limit.
            with suppress(NoSuchJob, WrongState):
                self._client.cancel(self.id)
        except GpuleaseError as error:
            self._keep(error.message)
            return
        self._over = True
        self._lift()
        self._when_over()

    def _leave(self) -> None:
        """Stop using a lease that the job keeps."""
        self._over = True
        # Without the hooks a framework that has begun would be held by nothing.
        if claimed_by() is None:
            self._lift()
        self._when_over()

    def _keep(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            text = f"the lease of job {self.id} is not given back: {why}"
            warnings.warn(text, LeaseKept, stacklevel=_ABOVE_US)

    def __enter__(self) -> Self:
        if self._over:
            raise GpuleaseError(
                f"cannot use the lease of job {self.id} again: it was given back",
                "call gpulease.lease for another",
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def __repr__(self) -> str:
        count = len(self.gpus)
        where = "1 GPU" if count == 1 else f"each of {count} GPUs"
        over = ", given back" if self._over else ""
        return f"<gpulease.Lease {self.id}: {format_size(self.memory)} on {where}{over}>"


_HOOK = "GPULEASE_HOOK"
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "GPULEASE_JOB",
    "GPULEASE_WORKER",
    "GPULEASE_MEMORY",
    "GPULEASE_MEMORY_FRACTION",
    _HOOK,
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "CUPY_GPU_MEMORY_LIMIT",
)
"""The variables of a lease, as docs/commands.md lists them."""


@dataclass(frozen=True, slots=True)
class InForce:
    """What the environment says of a lease; the lease may be over, or another job's."""

    job: str
    gpus: tuple[LeasedGpu, ...]
    split: int


def in_force() -> InForce | None:
    """Return the lease that this process was started with; None if there is none."""
    try:
        told = json.loads(config.environment()[_HOOK])
        gpus = tuple(LeasedGpu(str(gpu["uuid"]), int(gpu["memory"])) for gpu in told["gpus"])
        return InForce(str(told["job"]), gpus, int(told["options"]["split"]))
    except (KeyError, TypeError, ValueError):
        return None


def lease_variables() -> Mapping[str, str]:
    """Return the variables of the lease that is in force in this process."""
    environment = config.environment()
    return {name: environment[name] for name in _NAMES if name in environment}


def lease_around(client: Client, request: HoldRequest) -> NestedView | None:
    """Return the lease under which this process runs, as the daemon confirms it; None: none.

    Raises:
        AlreadyLeased: it runs under one that cannot give what is asked for.
    """
    try:
        return client.nested(NestedRequest(request.environment, request.claim, request.options))
    except AlreadyLeased as error:
        hint = f"{error.hint}; or start the job with more: gpulease run --mem SIZE"
        raise AlreadyLeased(error.message, hint) from None


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
