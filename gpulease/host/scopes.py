"""Scopes: systemd puts each job's processes into a cgroup that outlives the daemon.

Device rules are properties of the unit, so that systemd keeps them. Rules set without systemd are
lost at `systemctl daemon-reload`. systemd accepts the rules even if the kernel cannot enforce them,
so the kernel is asked. With cgroups of version 2 the rules are programs (CONFIG_CGROUP_BPF, see
BPF_PROG_QUERY in bpf(2)); with version 1 they are a file.

This is the only module that imports jeepney.
"""

import asyncio
import ctypes
import errno
import os
import platform
import pwd
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from jeepney import (
    DBusAddress,
    DBusErrorResponse,
    HeaderFields,
    MatchRule,
    Message,
    MessageFlag,
    message_bus,
    new_method_call,
)
from jeepney.io.asyncio import DBusRouter, Proxy, open_dbus_router
from jeepney.io.common import RouterClosed
from jeepney.wrappers import unwrap_msg

from gpulease.domain.host_share import HostShare
from gpulease.host.cgroups import SLICE, scope_name

_SYSTEM = "SYSTEM"
_LINGERING = Path("/var/lib/systemd/linger")
_SYSTEMD = Path("/run/systemd/system")
_DEVICES = Path("/proc/devices")
_WITHIN_S = 10.0
_ONCE_MORE_AFTER_S = 0.2
_NAME = "org.freedesktop.systemd1"
_REQUEST = "ssa(sv)a(sa(sv))"
_UNIT_EXISTS = f"{_NAME}.UnitExists"
_UNKNOWN_PROPERTY = "org.freedesktop.DBus.Error.PropertyReadOnly"
_AT_OOM = "OOMPolicy"
_DESTRUCTIVE = f"{_NAME}.TransactionIsDestructive"
_SHUTDOWN = "shutdown.target"
_SHUTTING_DOWN = "the machine is shutting down"
_DAEMON = "gpuleased.service"
_MANAGER = DBusAddress("/org/freedesktop/systemd1", _NAME, f"{_NAME}.Manager")
_LOGIND = DBusAddress(
    "/org/freedesktop/login1", "org.freedesktop.login1", "org.freedesktop.DBus.Properties"
)
_REMOVED = MatchRule(
    type="signal",
    interface=f"{_NAME}.Manager",
    member="JobRemoved",
    path="/org/freedesktop/systemd1",
)
_OF_GPUS = "nvidia"
"""The start of the names of NVIDIA's drivers in /proc/devices: nvidia (nvidia-frontend in older
ones), nvidia-uvm, nvidia-caps, nvidia-nvswitch, nvidia-modeset."""
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
"""What CUDA needs besides the GPU itself: nvidiactl for the resource manager, nvidia-uvm for the
address space, nvidia-uvm-tools for profilers and debuggers. They give access to no other GPU.
Jobs need neither nvidia-modeset, which sets displays, nor nvidia-caps, which configures MIG."""
SHARED_KINDS = ("nvidia-fs", "nvidia-caps-imex-channels")
"""NVIDIA's devices that give access to no other GPU: nvidia-fs for GPUDirect Storage, which
transfers between files and memory of the same process (cuFile), and the IMEX channels, by which
processes on several nodes share memory that each exports itself. Their nodes have permissions of
their own, by which an admin assigns channels to users."""


class NoScope(Exception):
    """systemd created no scope; the process is still in its old cgroup."""


class NotNow(Exception):
    """systemd creates no scope now, because it is stopping units or does not answer."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The properties of a job's scope."""

    job: int
    user: str
    grace: timedelta
    """Time between SIGTERM and SIGKILL when it is stopped, as at a shutdown."""
    gpus: Collection[str] | None = None
    """The device nodes of the leased GPUs; None: all devices may be opened."""
    ram: int | None = None
    """Bytes of RAM that its processes may use; None: all that the slice may."""
    cores: Collection[int] = ()
    """The CPUs that it may run on; empty: all."""
    share: HostShare | None = None

    @property
    def name(self) -> str:
        """The name of the unit."""
        return scope_name(self.job)


def is_available() -> bool:
    """Return whether this machine was booted with systemd; see sd_booted(3)."""
    return _SYSTEMD.is_dir()


def user_bus() -> str | None:
    """Return the address of this user's systemd, whose units outlive the session; None without one.

    Without lingering (loginctl(1)) it ends all its units when the user logs out.
    """
    uid = os.getuid()
    bus = Path(f"/run/user/{uid}/bus")
    try:
        lingers = (_LINGERING / pwd.getpwuid(uid).pw_name).exists()
    except KeyError:
        return None
    return f"unix:path={bus}" if lingers and bus.exists() else None


async def create(pid: int, scope: Scope, bus: str = _SYSTEM) -> None:
    """Move the process `pid` into a new scope, which its later children share.

    `bus` is that of the system, or the address of the bus of a user.

    Raises:
        NoScope: the scope could not be created.
        NotNow: the scope can be created later, for example because of a shutdown.
    """
    try:
        async with asyncio.timeout(_WITHIN_S), open_dbus_router(bus=bus) as router:
            if bus == _SYSTEM and await _prepares_for_shutdown(router):
                raise NotNow(_SHUTTING_DOWN)
            await Proxy(message_bus, router).AddMatch(_REMOVED)
            await _ask(router, "Subscribe")
            await _start(router, pid, scope)
    except (RouterClosed, TimeoutError) as error:
        raise NotNow("systemd does not answer") from error
    except (DBusErrorResponse, OSError, ValueError) as error:
        if isinstance(error, DBusErrorResponse) and error.name == _DESTRUCTIVE:
            raise NotNow(_SHUTTING_DOWN if _SHUTDOWN in _text(error) else _text(error)) from error
        raise NoScope(_why(error)) from error


def _why(error: Exception) -> str:
    """Return a message for people: an error from D-Bus is an object."""
    match error:
        case DBusErrorResponse():
            return f"systemd answered: {_text(error) or 'no reason'} ({error.name})"
        case OSError():
            return f"cannot reach D-Bus: {error.strerror or error}"
        case _:
            return str(error)


def _text(error: DBusErrorResponse) -> str:
    return next((each for each in error.data or () if isinstance(each, str)), "")


async def _prepares_for_shutdown(router: DBusRouter) -> bool:
    """Ask logind, which announces a shutdown seconds before systemd begins to stop units."""
    body = "org.freedesktop.login1.Manager", "PreparingForShutdown"
    question = new_method_call(_LOGIND, "Get", "ss", body)
    # If logind is not running, do not start it.
    question.header.flags |= MessageFlag.no_auto_start
    try:
        (answer,) = unwrap_msg(await router.send_and_get_reply(question))
    except DBusErrorResponse:
        return False
    return bool(answer[1])


async def _start(router: DBusRouter, pid: int, scope: Scope) -> None:
    """Start the unit and wait until systemd reports that it runs: then its rules are in force."""
    # Subscribed before the request: the signal may arrive before its answer has been read.
    with router.filter(_REMOVED, queue=asyncio.Queue()) as removed:
        result = await _result(removed, await _request_start(router, pid, scope))
    if result == "canceled":
        # By a shutdown that began meanwhile, or by a stop of the slice.
        raise NotNow("systemd canceled the start of a scope")
    if result != "done":
        raise ValueError(f"the result of its start was {result}")


async def _request_start(router: DBusRouter, pid: int, scope: Scope) -> Message:
    properties, no_other_units, waited = dict(_properties(pid, scope)), list[Any](), False
    while True:
        request = scope.name, "fail", list(properties.items()), no_other_units
        try:
            return await _ask(router, "StartTransientUnit", _REQUEST, request)
        except DBusErrorResponse as error:
            if error.name == _UNKNOWN_PROPERTY and _AT_OOM in properties:
                # systemd 247 has it for services only, and ends no scope.
                del properties[_AT_OOM]
            elif error.name == _UNIT_EXISTS and not waited:
                # The scope of an earlier launch, whose shim has just ended: systemd is about to
                # notice.
                waited = True
                await asyncio.sleep(_ONCE_MORE_AFTER_S)
            else:
                raise


async def _result(removed: "asyncio.Queue[Message]", answer: Message) -> str:
    """Wait for the end of the job in `answer`, from its sender only: anyone can send signals."""
    systemd = answer.header.fields[HeaderFields.sender]
    while True:
        signal = await removed.get()
        _, job, _, result = signal.body
        if signal.header.fields.get(HeaderFields.sender) == systemd and job == answer.body[0]:
            return str(result)


async def _ask(
    router: DBusRouter, method: str, signature: str | None = None, body: Any = ()
) -> Message:
    answer = await router.send_and_get_reply(new_method_call(_MANAGER, method, signature, body))
    unwrap_msg(answer)
    return answer


def _properties(pid: int, scope: Scope) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield the properties of the unit, named as in org.freedesktop.systemd1(5)."""
    yield "PIDs", ("au", [pid])
    yield "Description", ("s", f"gpulease job {scope.job} of {scope.user}")
    yield "Slice", ("s", SLICE)
    # Units stop in reverse order. At a shutdown the daemon stops first and grants nothing more, and
    # then the jobs are stopped. A stop of only the daemon stops no job.
    yield "Before", ("as", [_DAEMON])
    # A failed unit is removed too when it is empty; the job's record is elsewhere.
    yield "CollectMode", ("s", "inactive-or-failed")
    # By default, systemd ends the whole scope when the kernel kills one process for lack of RAM. A
    # program may start its worker process again.
    yield _AT_OOM, ("s", "continue")
    stop_us = int(scope.grace.total_seconds() * 1e6)
    yield "TimeoutStopUSec", ("t", stop_us)
    yield from _host_properties(scope)
    if scope.gpus is not None:
        yield "DevicePolicy", ("s", "closed")
        yield "DeviceAllow", ("a(ss)", list(allowed(scope.gpus)))


def _host_properties(scope: Scope) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield what the scope may use of CPUs and RAM, and its share where others want all of them.

    Neither MemoryHigh nor CPUQuota: a job above the first is slowed down without end, and with the
    second, frameworks start as many threads as without it.
    """
    # What the shim reads at the end is counted where accounting is on.
    yield "MemoryAccounting", ("b", True)
    if scope.share is not None:
        yield "CPUWeight", ("t", scope.share.weight)
        yield "MemoryLow", ("t", scope.share.protected)
    if scope.ram is not None:
        yield "MemoryMax", ("t", scope.ram)
        yield "MemorySwapMax", ("t", 0)
    if scope.cores:
        mask = sum(1 << cpu for cpu in scope.cores)
        yield "AllowedCPUs", ("ay", mask.to_bytes(mask.bit_length() // 8 + 1, "little"))


def allowed(gpus: Collection[str], devices: Path = _DEVICES) -> Iterator[tuple[str, str]]:
    """Yield every kind of device except NVIDIA's GPUs, and then the nodes that the job may open.

    The kernel has rules that allow, and none that deny. Of other devices, such as InfiniBand and
    /dev/fuse, a job may open those that its user may open.
    """
    yield "block-*", "rwm"
    character = devices.read_text(encoding="utf-8").partition("Block devices:")[0].splitlines()
    kinds = {line.split(maxsplit=1)[1] for line in character if line[:3].strip().isdigit()}
    for name in sorted(kinds):
        if not name.startswith(_OF_GPUS):
            yield f"char-{name}", "rwm"
        elif name in SHARED_KINDS:
            yield f"char-{name}", "rw"
    for node in (*CONTROL_NODES, *gpus):
        if Path(node).exists():
            yield node, "rw"


_SYSCALL = {"x86_64": 321, "aarch64": 280, "ppc64le": 361, "riscv64": 280, "s390x": 351}
_PROG_QUERY = 16
_CGROUP_DEVICE = 6
_ALL = "a *:* rwm"


class _Query(ctypes.Structure):
    """The part of union bpf_attr that BPF_PROG_QUERY reads and writes."""

    _fields_ = (
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("query_flags", ctypes.c_uint32),
        ("attach_flags", ctypes.c_uint32),
        ("prog_ids", ctypes.c_uint64),
        ("prog_cnt", ctypes.c_uint32),
        ("padding", ctypes.c_uint32 * 9),
    )


@cache
def kernel_has_device_rules(cgroup: Path) -> bool | None:
    """Return whether this kernel enforces device rules with cgroups of version 2; None: unknown."""
    count = _programs(cgroup)
    return None if count is None else count >= 0


def has_device_rules(cgroup: Path) -> bool | None:
    """Return whether device rules are in force for exactly this cgroup; None: unknown."""
    listed = cgroup / "devices.list"
    try:
        if listed.exists():
            return _ALL not in listed.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    count = _programs(cgroup)
    return None if count is None else count > 0


def _programs(cgroup: Path) -> int | None:
    """Return the number of device programs; -1 if the kernel has none, None if unknown."""
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return None
    try:
        fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    query = _Query(target_fd=fd, attach_type=_CGROUP_DEVICE)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.syscall(number, _PROG_QUERY, ctypes.byref(query), ctypes.sizeof(query))
    finally:
        os.close(fd)
    if failed:
        return -1 if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS) else None
    return int(query.prog_cnt)
