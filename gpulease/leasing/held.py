"""A lease that this process holds, from its grant to its release."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from gpulease.client import Client
from gpulease.errors import GpuleaseError, LeaseKept, NoSuchJob, WrongState
from gpulease.leasing.claimed import claimed_by
from gpulease.leasing.force import Lift
from gpulease.units import format_size

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
