"""`gpulease.lease` and its result: a lease that this process holds, or that of its job."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

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
from gpulease.lease_api.acquire import (
    GpuNames,
    Span,
    Visible,
    connect,
    environment_on_wire,
    granted,
    requested,
)
from gpulease.lease_api.activate import Undo, activate, variables
from gpulease.lease_api.cuda_state import CUDA, claimed_by
from gpulease.units import format_size
from gpulease.wire.jobs import NestedView
from gpulease.wire.requests import HoldRequest, NestedRequest, WorkerOptionsRequest
from gpulease.wire.text import most_of, on_gpus

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

_STACK_LEVEL = 4
"""Frames from a warning to the line that releases the lease, which is two above _release."""


@dataclass(frozen=True, slots=True)
class LeasedGpu:
    """One GPU of a lease."""

    uuid: str
    memory: int
    """Bytes that are leased; with a range, its bound."""


class Lease:
    """Leased GPU memory; created by `gpulease.lease`.

    As a context manager it is released at the end of the block. It belongs to the process that
    took it: in a forked child, `release` does nothing.
    """

    def __init__(
        self,
        client: Client,
        job: int,
        gpus: Sequence[LeasedGpu],
        environment: Mapping[str, str],
        undo: Undo,
        when_over: Callable[[], None],
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: it is the lease of the job of this process, and the job keeps it."""
        self.id: int = job
        """The number of the lease in `gpulease status` and `gpulease cancel`."""
        self.gpus: tuple[LeasedGpu, ...] = tuple(gpus)
        self.environment: Mapping[str, str] = MappingProxyType(dict(environment))
        """The variables of the lease, as set in os.environ."""
        self.pid: int = os.getpid()
        """The process that took it."""
        self._client = client
        self._undo = undo
        self._when_over = when_over
        self._shared = shared
        self._over = False
        self._warned = False

    @property
    def memory(self) -> int:
        """Bytes that are leased on each GPU; with a range, its bound."""
        return min(gpu.memory for gpu in self.gpus)

    @property
    def held(self) -> bool:
        """Whether the lease is held: not released, cancelled or past its time limit.

        This asks the daemon. If it does not answer, a lease that was not released counts as held.
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
        """Release the lease, and restore os.environ and the frameworks.

        If a framework has used the GPU, its memory is not free before this process ends, so the
        lease stays until then, with one `gpulease.errors.LeaseKept` warning.

        Inside a job, the job keeps its lease.
        """
        self._release()

    def _release(self) -> None:
        if self._over or os.getpid() != self.pid:
            return
        framework = claimed_by()
        if self._shared:
            self._over = True
            # Without the hooks, nothing would limit a framework that has used the GPU.
            if framework is None:
                self._undo()
            self._when_over()
            return
        if framework:
            self._keep(f"{framework} holds GPU memory until this process ends")
            return
        try:
            # It may have ended already: cancelled, or at its time limit.
            with suppress(NoSuchJob, WrongState):
                self._client.cancel(self.id)
        except GpuleaseError as error:
            self._keep(error.message)
            return
        self._over = True
        self._undo()
        self._when_over()

    def _keep(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            text = f"the lease of job {self.id} is not released: {why}"
            warnings.warn(text, LeaseKept, stacklevel=_STACK_LEVEL)

    def __enter__(self) -> Self:
        if self._over:
            raise GpuleaseError(
                f"cannot use the lease of job {self.id} again: it was released",
                "call gpulease.lease for a new one",
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
        has = on_gpus(format_size(self.memory), len(self.gpus))
        over = ", released" if self._over else ""
        return f"<gpulease.Lease {self.id}: {has}{over}>"


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
    "FLAGS_gpu_memory_limit_mb",
)
"""The variables of a lease, as listed in docs/commands/run.md."""


@dataclass(frozen=True, slots=True)
class InheritedLease:
    """The lease that the environment describes; it may have ended, or belong to another job."""

    job: str
    gpus: tuple[LeasedGpu, ...]
    split: int
    split_sizes: tuple[int, ...] = ()


def inherited_lease() -> InheritedLease | None:
    """Return the lease with which this process was started; None if there is none."""
    try:
        hook = json.loads(config.environment()[_HOOK])
        gpus = tuple(LeasedGpu(str(gpu["uuid"]), int(gpu["memory"])) for gpu in hook["gpus"])
        options = hook["options"]
        sizes = tuple(map(int, options.get("split_sizes", ())))
        return InheritedLease(str(hook["job"]), gpus, int(options["split"]), sizes)
    except (KeyError, TypeError, ValueError):
        return None


def lease_variables() -> Mapping[str, str]:
    """Return the variables of the lease that applies in this process."""
    environment = config.environment()
    return {name: environment[name] for name in _NAMES if name in environment}


_taking = threading.Lock()
"""Held by the thread that waits for the lease of this process."""
_held: Lease | None = None
"""The lease of this process; it lasts even if the caller drops the object."""


def held_lease() -> Lease | None:
    """Return the lease that this process has taken; None if it has none."""
    return _held if _held is not None and _held.pid == os.getpid() else None


def lease(  # noqa: PLR0913  each is part of the public API
    memory: str | int | None = None,
    *,
    gpus: int | None = None,
    gpu: GpuNames | None = None,
    gpu_model: str | None = None,
    min_vram: str | int | None = None,
    same_model: bool = False,
    linked: bool = False,
    exclusive: bool = False,
    ram: str | int | None = None,
    cpus: int | None = None,
    time_limit: Span | None = None,
    name: str | None = None,
    wait: Span | None = None,
    visible: Visible = "uuid",
    growth: bool = False,
    split: int | str = 1,
    processes: int | None = None,
    client: Client | None = None,
) -> Lease:
    """Lease GPU memory for this process, and limit its framework to it. Waits in the queue.

    Call it before the first use of a GPU; importing a framework earlier is harmless. `memory` is
    on each GPU: "4G", "40%", a number of bytes, or None for the daemon's default. `gpu` names the
    only suitable GPUs: 1, "GPU-5f3a" or a list; the lease is on all of them, or on `gpus` of them.
    `gpu_model` is a part of the name of the GPUs, such as "A100", and `min_vram` their least size,
    such as "40G"; with `same_model` all of them have the same name, and with `linked` each two are
    linked by NVLink. `ram` and `cpus` are what the process may use of the machine, such as "32G"
    and 8. `time_limit` and `wait` are seconds, "30m" or a timedelta; `wait=0` does not wait, None
    waits without limit. `visible`, `growth`, `split` and `processes` are options of `gpulease run`.
    Without a `client`, the daemon is found as the command finds it, or one is started.

    Inside a job, or a shell that holds a lease, nothing is queued: the lease of the job is
    returned, and releasing it does not end the job.

    Raises:
        AlreadyClaimed: a framework of this process has used the GPU.
        AlreadyLeased: this process has a lease, or belongs to a job with a smaller one.
        NoRoomNow: it was not granted within `wait`.
        CannotLease: this machine can never grant it.
        NoSuchGpu: `gpu` names none of this machine.
        NoDaemon: no daemon answers, and none can be started.
        BadValue: an argument cannot be read.
    """
    if not _taking.acquire(blocking=False):
        raise AlreadyLeased(
            "cannot lease: another thread of this process is waiting for a lease",
            "a process has one lease: take it before starting threads",
        )
    try:
        _refuse_second()
        if inherited_lease() is None:
            _refuse_if_claimed()
        claim, options, others = requested(
            memory=memory, gpus=gpus, gpu=gpu, gpu_model=gpu_model, min_vram=min_vram,
            same_model=same_model, linked=linked, exclusive=exclusive, ram=ram, cpus=cpus,
            time_limit=time_limit, name=name, wait=wait, visible=visible, growth=growth,
            split=split, processes=processes,
        )  # fmt: skip
        request = HoldRequest(environment_on_wire(), os.getpid(), claim, options, **others)
        daemon = client or connect()
        try:
            around = daemon.nested(NestedRequest(request.environment, claim, options))
        except AlreadyLeased as error:
            hint = f"{error.hint}; or start the job with more: gpulease run --mem SIZE"
            raise AlreadyLeased(error.message, hint) from None
        if around is not None:
            return _share(daemon, around, options)
        _refuse_if_claimed()
        return _take(daemon, request)
    finally:
        _taking.release()


def _take(client: Client, request: HoldRequest) -> Lease:
    global _held
    with granted(client, request) as (job, view):
        # Another thread may have used the GPU during the wait.
        _refuse_if_claimed()
        undo = activate(view)
    gpus = [LeasedGpu(leased.gpu, most_of(leased)) for leased in job.leases]
    _held = Lease(client, job.id, gpus, variables(view), undo, _forget)
    return _held


def _share(client: Client, around: NestedView, asked: WorkerOptionsRequest) -> Lease:
    """Return the lease of the job of this process."""
    global _held
    job, view = around.job, around.environment
    assert job is not None and view is not None, "the daemon sends both or none"
    if (here := inherited_lease()) is not None and here.job == str(job.id):
        _refuse_another_split(here, asked)
        # Nothing to undo: the hooks were installed when this interpreter started.
        gpus, undo = here.gpus, lambda: None
    else:
        # A process between the job and this one has cleared the environment.
        _refuse_if_claimed()
        undo = activate(view)
        gpus = tuple(LeasedGpu(gpu, around.memory or 0) for gpu in around.gpus)
    _held = Lease(client, job.id, gpus, lease_variables(), undo, _forget, shared=True)
    return _held


def _forget() -> None:
    global _held
    _held = None


def _refuse_second() -> None:
    mine = held_lease()
    if mine is not None and not mine.held:
        # Cancelled, or at its time limit: its variables and hooks are still set.
        _refuse_if_claimed()
        mine.release()
    elif mine is not None:
        raise AlreadyLeased(
            f"cannot lease: this process has a lease already, job {mine.id}",
            "ask for all memory in one lease, or release that one first; a lease that a framework "
            "has used ends with the process (in a notebook: restart the kernel)",
        )


def _refuse_another_split(here: InheritedLease, asked: WorkerOptionsRequest) -> None:
    there, wanted = (here.split, here.split_sizes), (asked.split, tuple(asked.split_sizes))
    if wanted not in ((1, ()), there):
        raise AlreadyLeased(
            f"cannot lease: job {here.job} splits each GPU into {_parts(*there)}, "
            f"not {_parts(*wanted)}",
            f"start the job with --split {_parts(*wanted)}, or leave out split=",
        )


def _parts(count: int, sizes: Sequence[int]) -> str:
    return ",".join(map(format_size, sizes)) or str(count)


def _refuse_if_claimed() -> None:
    framework = claimed_by()
    if framework == CUDA:
        raise AlreadyClaimed(
            "cannot lease: CUDA has started in this process, and sees its GPUs already",
            "call gpulease.lease before the first search for GPUs, also torch.cuda.is_available(); "
            "in a notebook, restart the kernel first",
        )
    if framework is not None:
        raise AlreadyClaimed(
            f"cannot lease: {framework} has set up its devices in this process already",
            f"call gpulease.lease before the first use of {framework} (importing it is harmless); "
            "in a notebook, restart the kernel first",
        )
