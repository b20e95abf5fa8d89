"""The sandbox of a job, set up before its first process: scope, device rules, driver limits.

The database notes which of them are in force and which are missing. A job waits if its device rules
would be wrong.
"""

import asyncio
import logging
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpulease.domain.enforcement import AppliedEnforcement
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.errors import LaunchDeferred, RecordUnwritable
from gpulease.host import cgroups, scopes
from gpulease.host.launch import Launch, SandboxSpec
from gpulease.host.shim_control import note_scope
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import MemoryLimiter, NotLimited

_log = logging.getLogger(__name__)

_CONTROL = Path("/dev/nvidiactl")
_UVM = Path("/dev/nvidia-uvm")
_MAKE_UVM = ("/usr/bin/nvidia-modprobe", "-u", "-c=0")
_MAKES_WITHIN_S = 30
_MAKE_AGAIN_AFTER_S = 60.0
_SHORT_UUID = len("GPU-12345678")

Note = Callable[[JobId, AppliedEnforcement], Awaitable[object]]
"""Stores the enforcement of a job. May raise RecordUnwritable."""
MakeScope = Callable[[int, scopes.Scope], Awaitable[None]]
"""Like scopes.create."""


class Sandbox:
    """Puts shims, which wait meanwhile, into the sandboxes of their jobs."""

    def __init__(
        self,
        limiter: Callable[[], MemoryLimiter | None],
        note: Note,
        make_scope: MakeScope = scopes.create,
        uvm: "UvmNode | None" = None,
    ) -> None:
        """`limiter` returns None if the driver cannot set limits."""
        self._limiter = limiter
        self._uvm = uvm or UvmNode()
        self._note = note
        self._make_scope = make_scope
        self._complaints = LogOnce(_log)

    async def __call__(self, pid: int, launch: Launch) -> Mapping[str, str] | None:
        """Put the shim of `launch`, which has this pid, into its sandbox, and note the result.

        Return the job's environment if the sandbox changes it: CUDA reports the driver's limit as
        the size of a GPU (NVIDIA, "MPS: memory partitioning"), and counts only the GPUs that device
        rules let it open. Otherwise return None.

        Raises:
            RecordUnwritable: the result cannot be stored now; nothing was launched.
            LaunchDeferred: systemd is stopping units, or a device node that CUDA needs is missing;
                nothing was launched.
        """
        wanted = launch.sandbox
        if wanted is None:
            return None
        applied = await self._set_up(pid, wanted, launch.shim.directory)
        try:
            await self._note(JobId(wanted.scope.job), applied)
        except RecordUnwritable:
            # The shim is about to end, and its cgroup will be removed.
            await self._remove_limits(wanted.scope.job, applied)
            raise
        if not (applied.limits or applied.devices):
            return None
        return wanted.environment(applied.limits, applied.devices)

    async def _remove_limits(self, job: int, applied: AppliedEnforcement) -> None:
        limiter, directory = self._limiter(), cgroups.directory_of(job)
        for gpu in applied.limits if limiter is not None and directory is not None else ():
            assert limiter is not None and directory is not None
            with suppress(NotLimited):
                await asyncio.to_thread(limiter.remove_limit, gpu, directory)

    async def _set_up(self, pid: int, wanted: SandboxSpec, directory: str) -> AppliedEnforcement:
        job, gpus = wanted.scope.job, wanted.scope.gpus if self._uvm.is_applicable else None
        if gpus is not None and (why := await self._uvm.obstacle()) is not None:
            raise LaunchDeferred(why)
        try:
            await self._make_scope(pid, replace(wanted.scope, gpus=gpus))
        except scopes.NotNow as error:
            raise LaunchDeferred(f"cannot start jobs now: {error}") from error
        except scopes.NoScope as error:
            self._complaints.say(
                "scope", f"cannot create a scope for job {job}: {error}",
                why=str(error),
            )  # fmt: skip
            why = "it runs without a scope, can open every GPU, and has no limit of the driver"
            return AppliedEnforcement(missing=(why,))
        self._complaints.passed("scope")
        try:
            note_scope(Path(directory))
        except OSError as error:
            raise RecordUnwritable(
                f"cannot start job {job}: cannot write to its directory: {error.strerror}",
                "ask an admin to make the state directory writable",
            ) from error
        missing = []
        rules = None if gpus is None else await asyncio.to_thread(cgroups.device_directory_of, job)
        # If this is not known, do not claim that they are in force.
        devices = rules is not None and scopes.has_device_rules(rules) is True
        if devices:
            self._complaints.passed("devices")
        elif gpus is not None:
            missing = ["it can open every GPU: the kernel does not enforce its device rules"]
            self._complaints.say("devices", f"job {job}: {missing[0]}", why=missing[0])
        limits, refusals = await self._set_limits(job, wanted.memory)
        return AppliedEnforcement(devices, limits, (*missing, *refusals))

    async def _set_limits(
        self, job: int, memory: Mapping[GpuUuid, int]
    ) -> tuple[dict[GpuUuid, int], list[str]]:
        """Let the driver limit the job; return the limits, and why others were not set."""
        limiter = self._limiter()
        directory = cgroups.directory_of(job) if limiter is not None else None
        if limiter is None or directory is None:
            return {}, []
        # All GPUs at once: together they take no longer than one.
        answers = await asyncio.gather(
            *(
                asyncio.to_thread(limiter.set_limit, uuid, directory, leased)
                for uuid, leased in memory.items()
            ),
            return_exceptions=True,
        )
        limits, refusals = {}, []
        for uuid, answer in zip(memory, answers, strict=True):
            if isinstance(answer, int):
                limits[uuid] = answer
                self._complaints.passed(uuid)
            elif isinstance(answer, Exception):
                refusals.append(f"no limit of the driver on {uuid[:_SHORT_UUID]}: {answer}")
                bug = None if isinstance(answer, NotLimited) else answer
                text = f"job {job}: {refusals[-1]}"
                self._complaints.say(uuid, text, why=str(answer), bug=bug)
            else:
                raise answer
        return limits, refusals


class UserSandbox:
    """Puts shims of jobs that lease RAM into scopes of the systemd of their user.

    It holds RAM, and neither devices nor cores. Where it does not work, the shim watches the job.
    """

    def __init__(
        self, bus: str, make_scope: Callable[..., Awaitable[None]] = scopes.create
    ) -> None:
        self._bus = bus
        self._make_scope = make_scope
        self._complaints = LogOnce(_log)

    async def __call__(self, pid: int, launch: Launch) -> None:
        """Put the shim of `launch`, which has this pid, into a scope."""
        if launch.sandbox is None:
            return
        scope = replace(launch.sandbox.scope, gpus=None, cores=())
        try:
            await self._make_scope(pid, scope, self._bus)
        except (scopes.NoScope, scopes.NotNow) as error:
            text = f"cannot create a scope for job {scope.job}, so its RAM is watched: {error}"
            self._complaints.say("scope", text, why=str(error))


class UvmNode:
    """The device node for CUDA's address space, which CUDA creates at its first use if missing.

    By then the job's device rules are in force, and they cannot name a missing node: the number of
    the device is not known before its module is loaded.
    """

    def __init__(
        self, node: Path = _UVM, make: Sequence[str] = _MAKE_UVM, control: Path = _CONTROL
    ) -> None:
        """`make` is the command that loads the module and creates the node.

        If `control` is missing too, this machine has other device nodes (Tegra, WSL) and no rules.
        """
        self._control = control
        self._node = node
        self._make = make
        self._made_at: float | None = None
        self._failed = ""
        self._one_at_a_time = asyncio.Lock()

    @property
    def is_applicable(self) -> bool:
        """Whether this machine has the device nodes that device rules name."""
        return self._control.exists()

    async def obstacle(self) -> str | None:
        """Create the node if it is missing; return why jobs cannot be started, or None."""
        if self._node.exists() or not self.is_applicable:
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
        """Create the node; return why that failed, or an empty string."""
        command = " ".join(self._make)
        if not Path(self._make[0]).exists():
            return f"{self._make[0]}, which creates it, is missing too"
        try:
            done = subprocess.run(
                self._make, check=False, capture_output=True, text=True, timeout=_MAKES_WITHIN_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command} failed: {error}"
        said = " ".join((done.stderr or done.stdout).split())[:200]
        return "" if self._node.exists() else f"{command} did not create it{said and f': {said}'}"
