"""What is put around a job before its first process: a scope, device rules, the driver's limits.

Each is told of only when it is known to be in force; where one is not to be had, the job runs
without, and the record says so.
"""

import asyncio
import logging
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from gpulease.daemon.shims import note_scope
from gpulease.domain.enforcement import Enclosed
from gpulease.domain.memory import GpuUuid, JobId
from gpulease.errors import RecordUnwritable
from gpulease.process import cgroups, device_rules, scopes
from gpulease.process.launcher import Launch
from gpulease.service.limiting import MemoryLimiter, NotLimited

_log = logging.getLogger(__name__)

_LONGER_THAN_THE_GRACE = timedelta(seconds=10)
"""For the shim to write its record, and to hand on the last of the output."""
_UVM = Path("/dev/nvidia-uvm")
_MAKE_UVM = ("/usr/bin/nvidia-modprobe", "-u", "-c=0")
_MAKES_WITHIN_S = 30
_SHORT_UUID = len("GPU-12345678")

Note = Callable[[JobId, Enclosed], Awaitable[object]]
"""Stores what is around a job; may raise RecordUnwritable."""
MakeScope = Callable[[int, scopes.Scope], Awaitable[None]]
"""As scopes.enclose."""


class Enclosure:
    """Encloses shims, one for each job, which wait meanwhile."""

    def __init__(
        self,
        limiter: Callable[[], MemoryLimiter | None],
        note: Note,
        make_scope: MakeScope = scopes.enclose,
    ) -> None:
        """`limiter` returns None where no limit of the driver's is to be tried."""
        self._limiter = limiter
        self._note = note
        self._make_scope = make_scope

    async def __call__(self, pid: int, launch: Launch) -> Mapping[str, str] | None:
        """Put the shim of `launch`, whose pid this is, into all that there is, and note it.

        Return the job's environment where the driver limits it, since CUDA shows it the limit as
        all that a GPU has (NVIDIA, "MPS: memory partitioning"), and where device rules are in
        force, since CUDA counts the GPUs that it can open; None where it stays as it is.

        Raises:
            RecordUnwritable: it cannot be noted at this moment; nothing was launched.
        """
        enclosed = await self._enclose(pid, launch)
        try:
            await self._note(JobId(launch.job), enclosed)
        except RecordUnwritable:
            # The shim is about to leave, and its cgroup with it.
            await self._lift(launch.job, enclosed)
            raise
        if launch.environment_within is None or not (enclosed.limits or enclosed.devices):
            return None
        limits = {str(gpu): kept for gpu, kept in enclosed.limits.items()}
        return launch.environment_within(limits, enclosed.devices)

    async def _lift(self, job: int, enclosed: Enclosed) -> None:
        limiter, directory = self._limiter(), cgroups.directory_of(job)
        for gpu in enclosed.limits if limiter is not None and directory is not None else ():
            assert limiter is not None and directory is not None
            with suppress(NotLimited):
                await asyncio.to_thread(limiter.lift, gpu, directory)

    async def _enclose(self, pid: int, launch: Launch) -> Enclosed:
        gpus, missing = launch.gpus, []
        if gpus is not None and not await asyncio.to_thread(_uvm_is_there):
            missing.append(f"it may open every GPU: there is no {_UVM} to allow it")
            gpus = None
        try:
            await self._make_scope(pid, _scope(launch, gpus))
        except scopes.NoScope as error:
            _log.warning("job %s runs without a scope: %s", launch.job, error)
            why = "it runs without a scope, may open every GPU, and has no limit by the driver"
            return Enclosed(missing=(why,))
        _remember(launch)
        devices = gpus is not None and await asyncio.to_thread(_rules_are_in_force, launch.job)
        if gpus is not None and not devices:
            missing.append("it may open every GPU: the kernel does not enforce its device rules")
        for each in missing:
            _log.warning("job %s: %s", launch.job, each)
        limits, refusals = await self._limit(launch)
        return Enclosed(devices, limits, (*missing, *refusals))

    async def _limit(self, launch: Launch) -> tuple[dict[GpuUuid, int], list[str]]:
        """Have the driver limit the job; return what it keeps to, and why it does not."""
        limiter = self._limiter()
        directory = cgroups.directory_of(launch.job) if limiter is not None else None
        if limiter is None or directory is None:
            return {}, []
        uuids = [GpuUuid(uuid) for uuid in launch.memory]
        # Of several GPUs each has its own patience: together they take no longer than one.
        answers = await asyncio.gather(
            *(
                asyncio.to_thread(limiter.limit, uuid, directory, launch.memory[uuid])
                for uuid in uuids
            ),
            return_exceptions=True,
        )
        limits, refusals = {}, []
        for uuid, answer in zip(uuids, answers, strict=True):
            if isinstance(answer, int):
                limits[uuid] = answer
            elif isinstance(answer, Exception):
                refusals.append(f"no limit by the driver on {uuid[:_SHORT_UUID]}: {answer}")
                bug = None if isinstance(answer, NotLimited) else answer
                _log.warning("job %s: %s", launch.job, refusals[-1], exc_info=bug)
            else:
                raise answer
        return limits, refusals


def _scope(launch: Launch, gpus: tuple[str, ...] | None) -> scopes.Scope:
    user = launch.identity.user if launch.identity is not None else "root"
    grace = launch.grace_at_shutdown
    grace = (launch.grace if grace is None else grace) + _LONGER_THAN_THE_GRACE
    return scopes.Scope(launch.job, user, grace, gpus)


def _remember(launch: Launch) -> None:
    try:
        note_scope(launch.directory)
    except OSError as error:
        raise RecordUnwritable(
            f"cannot start job {launch.job}: its directory cannot be written: {error.strerror}",
            "an admin should see that the state directory can be written",
        ) from error


def _rules_are_in_force(job: int) -> bool:
    directory = cgroups.device_directory_of(job)
    # That there is no telling is no ground to say that they are.
    return directory is not None and device_rules.are_in_force(directory) is True


def _uvm_is_there() -> bool:
    """See to it that the node exists: CUDA makes it when first used, too late to be allowed then.

    Its major number is known only when its module has been loaded.
    """
    if not _UVM.exists() and Path(_MAKE_UVM[0]).exists():
        try:
            subprocess.run(_MAKE_UVM, check=False, capture_output=True, timeout=_MAKES_WITHIN_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.warning("%s: %s", " ".join(_MAKE_UVM), error)
    return _UVM.exists()
