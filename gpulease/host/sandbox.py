"""What is put around a job before its first process: a scope, device rules, the driver's limits.

The record names what is known to be in force, and what is missing. A job waits where its device
rules could not be right.
"""

import asyncio
import logging
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from gpulease.domain.enforcement import AppliedEnforcement
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.errors import LaunchDeferred, RecordUnwritable
from gpulease.host import cgroups, scopes
from gpulease.host.launcher import Launch
from gpulease.host.shim_control import note_scope
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import MemoryLimiter, NotLimited

_log = logging.getLogger(__name__)

_LONGER_THAN_THE_GRACE = timedelta(seconds=10)
"""For the shim to write its record, and to hand on the last of the output."""
_CONTROL = Path("/dev/nvidiactl")
_UVM = Path("/dev/nvidia-uvm")
_MAKE_UVM = ("/usr/bin/nvidia-modprobe", "-u", "-c=0")
_MAKES_WITHIN_S = 30
_MAKE_AGAIN_AFTER_S = 60.0
_SHORT_UUID = len("GPU-12345678")

Note = Callable[[JobId, AppliedEnforcement], Awaitable[object]]
"""Stores what is around a job; may raise RecordUnwritable."""
MakeScope = Callable[[int, scopes.Scope], Awaitable[None]]
"""As scopes.enclose."""


class Sandbox:
    """Encloses shims, one for each job, which wait meanwhile."""

    def __init__(
        self,
        limiter: Callable[[], MemoryLimiter | None],
        note: Note,
        make_scope: MakeScope = scopes.enclose,
        uvm: "UvmNode | None" = None,
    ) -> None:
        """`limiter` returns None where no limit of the driver's is to be tried."""
        self._limiter = limiter
        self._uvm = uvm or UvmNode()
        self._note = note
        self._make_scope = make_scope
        self._complaints = LogOnce(_log)

    async def __call__(self, pid: int, launch: Launch) -> Mapping[str, str] | None:
        """Put the shim of `launch`, whose pid this is, into all that there is, and note it.

        Return the job's environment where the driver limits it, since CUDA shows it the limit as
        all that a GPU has (NVIDIA, "MPS: memory partitioning"), and where device rules are in
        force, since CUDA counts the GPUs that it can open; None where it stays as it is.

        Raises:
            RecordUnwritable: it cannot be noted at this moment; nothing was launched.
            LaunchDeferred: systemd is stopping units, or what CUDA needs is not there to be
                allowed; nothing was launched.
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

    async def _lift(self, job: int, enclosed: AppliedEnforcement) -> None:
        limiter, directory = self._limiter(), cgroups.directory_of(job)
        for gpu in enclosed.limits if limiter is not None and directory is not None else ():
            assert limiter is not None and directory is not None
            with suppress(NotLimited):
                await asyncio.to_thread(limiter.remove_limit, gpu, directory)

    async def _enclose(self, pid: int, launch: Launch) -> AppliedEnforcement:
        gpus = launch.gpus if self._uvm.has_neighbours else None
        if gpus is not None and (why := await self._uvm.obstacle()) is not None:
            raise LaunchDeferred(why)
        try:
            await self._make_scope(pid, _scope(launch, gpus))
        except scopes.NotNow as error:
            raise LaunchDeferred(f"cannot start jobs now: {error}") from error
        except scopes.NoScope as error:
            self._complaints.say(
                "scope", f"jobs run without a scope, as job {launch.job} does: {error}",
                why=str(error),
            )  # fmt: skip
            why = "it runs without a scope, may open every GPU, and has no limit by the driver"
            return AppliedEnforcement(missing=(why,))
        self._complaints.passed("scope")
        _remember(launch)
        missing = []
        devices = gpus is not None and await asyncio.to_thread(_rules_are_in_force, launch.job)
        if gpus is not None and not devices:
            missing.append("it may open every GPU: the kernel does not enforce its device rules")
        for each in missing:
            self._complaints.say("devices", f"job {launch.job}: {each}", why=each)
        if devices:
            self._complaints.passed("devices")
        limits, refusals = await self._limit(launch)
        return AppliedEnforcement(devices, limits, (*missing, *refusals))

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
                asyncio.to_thread(limiter.set_limit, uuid, directory, launch.memory[uuid])
                for uuid in uuids
            ),
            return_exceptions=True,
        )
        limits, refusals = {}, []
        for uuid, answer in zip(uuids, answers, strict=True):
            if isinstance(answer, int):
                limits[uuid] = answer
                self._complaints.passed(uuid)
            elif isinstance(answer, Exception):
                refusals.append(f"no limit by the driver on {uuid[:_SHORT_UUID]}: {answer}")
                bug = None if isinstance(answer, NotLimited) else answer
                text = f"job {launch.job}: {refusals[-1]}"
                self._complaints.say(uuid, text, why=str(answer), bug=bug)
            else:
                raise answer
        return limits, refusals


class UvmNode:
    """The node that CUDA opens for its address space, and otherwise makes when it is first used.

    By then the device rules of the job are in force. They cannot name it beforehand: the number of
    the device is known when its module has been loaded.
    """

    def __init__(
        self, node: Path = _UVM, make: Sequence[str] = _MAKE_UVM, control: Path = _CONTROL
    ) -> None:
        """`make` is the command that loads the module and makes the node.

        Where `control` is missing as well, GPUs have other nodes here (Tegra, WSL), and no rules.
        """
        self._control = control
        self._node = node
        self._make = make
        self._made_at: float | None = None
        self._failed = ""
        self._one_at_a_time = asyncio.Lock()

    @property
    def has_neighbours(self) -> bool:
        """Whether GPUs have the nodes here that device rules name."""
        return self._control.exists()

    async def obstacle(self) -> str | None:
        """See to it that the node exists; return why jobs cannot be started, or None."""
        if self._node.exists() or not self.has_neighbours:
            return None
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._made_at is None or now - self._made_at > _MAKE_AGAIN_AFTER_S:
                self._made_at, before = now, self._failed
                self._failed = await asyncio.to_thread(self._make_node)
                if self._failed not in ("", before):
                    _log.warning(self._why())
        return None if self._node.exists() else self._why()

    def _why(self) -> str:
        return f"cannot start jobs now: CUDA needs {self._node}, which is missing; {self._failed}"

    def _make_node(self) -> str:
        """Make the node; return why it is not there, or nothing."""
        command = " ".join(self._make)
        if not Path(self._make[0]).exists():
            return f"there is no {self._make[0]} to make it"
        try:
            done = subprocess.run(
                self._make, check=False, capture_output=True, text=True, timeout=_MAKES_WITHIN_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command} failed: {error}"
        said = " ".join((done.stderr or done.stdout).split())[:200]
        return "" if self._node.exists() else f"{command} did not make it{said and f': {said}'}"


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
    return directory is not None and scopes.are_in_force(directory) is True
